"""A server of ours in a process of its own, and a scripted one in a thread, for their tests."""

import contextlib
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SERVE = Path(__file__).parents[1] / "scripts" / "serve.py"


@contextlib.contextmanager
def running_server(*arguments):
    """Start scripts/serve.py on a free port; give its address."""
    command = [sys.executable, str(SERVE), "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said.startswith("serving "), said
            yield said.split()[-1]
        finally:
            process.terminate()


@contextlib.contextmanager
def scripted_server(answer, url="http://127.0.0.1:0"):
    """Serve ``answer(method, kwargs) -> (status, object)`` on POST /call, None hangs up; give its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = answer(request["method"], request["kwargs"])
            if reply is None:
                self.close_connection = True
                return
            status, content = reply
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", int(url.rpartition(":")[2])), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def ok(result):
    """A successful answer of the protocol."""
    return 200, {"status": "success", "result": result, "error": None}
