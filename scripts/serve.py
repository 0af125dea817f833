"""Serve the games over the HTTP protocol of the public affinetes environments.

    python scripts/serve.py --port 8765
    python scripts/serve.py --run runs/mine --opponent random --max-episodes 200 --idle-seconds 600

Routes: GET /health, GET /methods, POST /call {"method": ..., "args": [...], "kwargs": {...}} and POST /{method}, where
method is reset(task_id, seed, opponent), step(action, episode_id), state(episode_id) or stop(episode_id). What differs
from the public servers, and why, is listed in docs/compatibility.md.
"""

import argparse
import asyncio
import inspect
import json
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    import config.start  # noqa: F401, before libraries load

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

import games
from config.flags import FlagParser
from config.reader import blaming, load_config
from env_wrapper import check_games
from envs.config import EnvConfig
from scripts.serving.actor import CLIENT, MAX_SHOWN, STOPPING, Actor, RequestError, read_task
from training.process import at_least, setup_logging

MAX_BODY_BYTES = 2**20
LOOPBACK = ("127.0.0.1", "localhost", "::1")
REQUEST_SECONDS = 10.0  # for a client to send the head of a request, again for its body, again to read the answer
SHUTDOWN_SECONDS = 1  # for requests in progress when the server stops


async def _body(request: Request) -> Any:
    """Return the JSON object in a request's body, {} where the body is empty."""
    body = bytearray()
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    except ClientDisconnect as error:  # nobody will read this answer
        raise HTTPException(400, "the body was cut short") from error
    except TimeoutError as error:
        raise HTTPException(408, f"the body has not arrived within {REQUEST_SECONDS:g} s") from error
    try:
        data = json.loads(body) if body else {}
    except (ValueError, RecursionError) as error:
        raise HTTPException(422, f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise HTTPException(422, "the body is not a JSON object")
    return data


async def _invoke(actor: Actor, request: Request, name: Any, args: Any, kwargs: Any) -> JSONResponse:
    if name not in actor.methods:
        raise HTTPException(404, f"no method {name[:MAX_SHOWN]!r}: there are {', '.join(actor.methods)}")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise HTTPException(422, "args must be a list and kwargs an object")
    if isinstance(nested := kwargs.get("kwargs"), dict):  # the public client's example wraps its arguments like this
        kwargs = {key: value for key, value in kwargs.items() if key != "kwargs"} | nested
    method = actor.methods[name]
    signature = inspect.signature(method)
    CLIENT.set(request)
    try:
        with blaming(f"{name}{signature}: ", TypeError, raising=partial(RequestError, "invalid_request")):
            signature.bind(*args, **kwargs)
        result = await method(*args, **kwargs)
    except RequestError as error:
        result = error.response()
    return JSONResponse({"status": "success", "result": result, "error": None})


def make_app(actor: Actor) -> Starlette:
    """Return the ASGI application."""

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def list_methods(request: Request) -> JSONResponse:
        methods = [{"name": name, "signature": str(inspect.signature(method)), "source": "Actor",
                    "endpoint": f"POST /{name}"} for name, method in actor.methods.items()]  # fmt: skip
        usage = {
            "sdk_style": 'POST /call {"method": "reset", "args": [], "kwargs": {...}}',
            "restful_style": 'POST /reset {"task_id": 0, ...}',
        }
        return JSONResponse({"methods": methods, "usage": usage})

    async def answer(request: Request) -> JSONResponse:
        data, name = await _body(request), request.path_params["method"]
        if name == "call":
            name = data.get("method")
            if not isinstance(name, str):
                raise HTTPException(422, 'the body needs a "method"')
        elif "args" not in data and "kwargs" not in data:
            data = {"kwargs": data}
        if beside := data.keys() - {"method", "args", "kwargs"}:  # a game other than the one meant would be played
            raise HTTPException(422, f"{min(beside)[:MAX_SHOWN]!r} stands beside args and kwargs, not in kwargs")
        return await _invoke(actor, request, name, data.get("args", []), data.get("kwargs", {}))

    async def call(request: Request) -> JSONResponse:
        try:
            return await answer(request)
        except asyncio.CancelledError as error:  # the game's work, or all of it by uvicorn, which would log forty lines
            raise HTTPException(503, STOPPING) from error

    async def refuse(request: Request, error: Any) -> JSONResponse:
        return JSONResponse({"detail": error.detail}, error.status_code)

    async def fail(request: Request, error: Exception) -> JSONResponse:
        told = {"detail": f"{type(error).__name__}: {error}"}
        return JSONResponse(told, 500, {"Connection": "close"})  # as uvicorn does: the next call would be lost

    routes = [Route("/health", health), Route("/methods", list_methods), Route("/{method}", call, methods=["POST"])]
    return Starlette(routes=routes, exception_handlers={HTTPException: refuse, Exception: fail})


class ImpatientProtocol(H11Protocol):
    """uvicorn's HTTP with deadlines for sending a request's head and for reading the answer; ``_body`` has the body's.

    A client that misses one is disconnected.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _answer_timer: asyncio.TimerHandle  # since ``pause_writing``

    def connection_made(self, transport: Any) -> None:
        """Start the timer of the first request's head."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # ``pause_writing`` is then called as soon as anything is left unread
        self._head_timer = self.loop.call_later(REQUEST_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        """Stop the timer once the head is complete; start it with the first byte of the next request's head."""
        super().data_received(data)
        head_complete = self.cycle is not None and not self.cycle.response_complete
        if head_complete and self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None
        elif not head_complete and not self._head_timer:
            self._head_timer = self.loop.call_later(REQUEST_SECONDS, self.transport.close)

    def pause_writing(self) -> None:
        """Start the timer of an answer that the client is not reading. ``close`` would wait for it to be read."""
        super().pause_writing()
        self._answer_timer = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the answer's timer."""
        super().resume_writing()
        self._answer_timer.cancel()


class GameServer(uvicorn.Server):
    """uvicorn's server, which drops its games when it stops and remembers whether SIGINT stopped it."""

    def __init__(self, actor: Actor):
        super().__init__(uvicorn.Config(make_app(actor), log_level="error", access_log=False, http=ImpatientProtocol,
                                        timeout_graceful_shutdown=SHUTDOWN_SECONDS))  # fmt: skip
        self.actor, self.interrupted = actor, False

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Remember an interrupt, then stop as uvicorn does."""
        self.interrupted = self.interrupted or sig == signal.SIGINT
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drop the games, then stop. Not in ``handle_exit``: the code a signal interrupts may hold their locks."""
        self.actor.close()
        await super().shutdown(sockets)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--port", type=at_least(0, 65535), default=8765, help="0: a free one (default 8765)")
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--run", metavar="RUN", help="also serve the games of this run's env.games_path")
    add("--games-path", metavar="DIR", help="also serve the games in this folder, not the run's: docs/adding_a_game.md")
    add("--opponent", default="mcts", help="where reset names none (default mcts)")
    add("--max-episodes", type=at_least(1), default=1000, help="at a time (default 1000)")
    add("--idle-seconds", type=at_least(0.001), default=3600, help="until an episode is dropped (default 3600)")
    add("--search-threads", type=at_least(0), default=0, help="for opponents that search (default: one per core)")
    add("--max-search", type=at_least(0.001), default=1,
        help="most that clients may ask an opponent to search, times the game's own budget (default 1)")  # fmt: skip
    args = parser.parse_args(argv)
    files = [Path(args.run) / "run_config.json"] if args.run else []
    sets = [f"env.games_path={json.dumps(args.games_path)}"] if args.games_path else []
    with blaming(raising=parser.error):
        with blaming("--games-path: "):
            EnvConfig(games_path=args.games_path or "")
        load_config({"env": EnvConfig}, files, sets, skip_unknown_sections=True)
        check_games()
        with blaming("--opponent: "):
            read_task(0, 0, args.opponent, math.inf)  # --max-search limits clients only
    return args


def _listen(host: str, port: int) -> socket.socket:
    # asyncio disables Nagle's algorithm, which delays answers by 40 ms, only on sockets created with IPPROTO_TCP.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()  # before the address is printed
    return listener


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped; exit codes: 1 cannot listen on the address, 2 bad usage, 130 interrupted."""
    setup_logging()
    args = _arguments(argv)
    try:
        listener = _listen(args.host, args.port)
    except (OSError, TypeError, UnicodeError) as error:  # the last two: a string that cannot be a host name
        why = getattr(error, "strerror", None) or error
        print(f"serve: cannot listen on {args.host} port {args.port}: {why}", file=sys.stderr)
        return 1
    if args.host not in LOOPBACK:
        print("serve: every machine that reaches this address may play: there are no passwords", file=sys.stderr)
    actor = Actor(args.opponent, args.max_episodes, args.idle_seconds, args.search_threads, args.max_search)
    server = GameServer(actor)
    host = f"[{args.host}]" if ":" in args.host else args.host
    # uvicorn installs its handlers only once its loop runs. Until then SIGINT may be ignored (a shell script's & starts
    # programs so), or raise KeyboardInterrupt during an import, in a callback whose exceptions are lost.
    signal.signal(signal.SIGINT, server.handle_exit)
    print(f"serving {len(games.GAMES)} games on http://{host}:{listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])
    return 130 if server.interrupted else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a normal exit would wait for the threads that still search
