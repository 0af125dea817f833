"""A server of ours in a process of its own, and a scripted one in a thread, for their tests."""

import contextlib
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import games

RESET = "# Game Rules\nBe first.\n\n# Current Game State\n"
POSITION = (
    "Game: {game}\nYou are Player 0.\n\nCurrent State:\nboard\n\nof two parts\n\nLegal Actions:\n  3 -> c1\n"
    "  14 -> take 2 -> now\n\nYour choice (action ID only):"
)
SERVE = Path(__file__).parents[2] / "scripts" / "serve.py"


@contextlib.contextmanager
def server_process(*arguments):
    """Start scripts/serve.py on a free port; give the process and its address."""
    command = [sys.executable, str(SERVE), "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said.startswith("serving "), said
            yield process, said.split()[-1]
        finally:
            process.terminate()


@contextlib.contextmanager
def running_server(*arguments):
    """Start scripts/serve.py on a free port; give its address."""
    with server_process(*arguments) as (_, url):
        yield url


@contextlib.contextmanager
def http_server(answer, url="http://127.0.0.1:0"):
    """Serve ``answer(path, object, headers) -> (status, text or bytes)``, None hangs up; give the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = answer(self.path, request, dict(self.headers))
            if reply is None:
                self.close_connection = True
                return
            status, content = reply
            body = content.encode() if isinstance(content, str) else content
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", int(url.rpartition(":")[2])), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()  # looked at for the end
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def scripted_server(answer, url="http://127.0.0.1:0"):
    """Serve ``answer(method, kwargs) -> (status, object)`` on POST /call, None hangs up; give its address."""

    def reply(path, request, headers):
        found = answer(request["method"], request["kwargs"])
        return found and (found[0], json.dumps(found[1]))

    return http_server(reply, url)


def said(text):
    """An answer of OpenAI's chat protocol."""
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


def ok(result):
    """A successful answer of the protocol."""
    return 200, {"status": "success", "result": result, "error": None}


def task_id(name):
    return games.NAMES.index(name) * games.CONFIGS_PER_GAME


def answer(observation, done=False, reward=0.0, error=None, **told):
    """An OpenEnvResponse as public servers give it."""
    info = {"task_id": task_id("leduc_poker"), "seed": 4, "game_name": "leduc_poker", "llm_player_id": 0,
            "opponent_type": "random", "step_count": 0, "cumulative_reward": 0.0} | told  # fmt: skip
    if error:
        info["error"] = {"type": error, "message": "no", "retryable": False}
    return {"observation": observation, "reward": reward, "done": done, "truncated": False, "episode_id": "e1",
            "info": info}  # fmt: skip
