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
from scripts.serving.actor import CLIENT, Actor, RequestError, read_task
from training.process import at_least, setup_logging

MAX_BODY_BYTES = 2**20
LOOPBACK = ("127.0.0.1", "localhost", "::1")
REQUEST_SECONDS = 10.0  # for a client to send the head of a request, and again for its body
SHUTDOWN_SECONDS = 1  # for requests under way, once the server is to end


async def _body(request: Request) -> Any:
    """Return the JSON object of a request's body; no body is an empty one."""
    body = bytearray()
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    except ClientDisconnect as error:  # nobody hears the answer
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
        raise HTTPException(404, f"no method {name!r}: there are {', '.join(actor.methods)}")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise HTTPException(422, "args must be a list and kwargs an object")
    if isinstance(nested := kwargs.get("kwargs"), dict):  # as the public client's example passes them on
        kwargs = {key: value for key, value in kwargs.items() if key != "kwargs"} | nested
    method, signature = actor.methods[name], inspect.signature(actor.methods[name])
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

    async def call(request: Request) -> JSONResponse:
        data, name = await _body(request), request.path_params["method"]
        if name == "call":
            name = data.get("method")
            if not isinstance(name, str):
                raise HTTPException(422, 'the body needs a "method"')
        elif "args" not in data and "kwargs" not in data:
            data = {"kwargs": data}
        return await _invoke(actor, request, name, data.get("args", []), data.get("kwargs", {}))

    async def refuse(request: Request, error: Any) -> JSONResponse:
        return JSONResponse({"detail": error.detail}, error.status_code)

    async def fail(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": f"{type(error).__name__}: {error}"}, 500)

    routes = [Route("/health", health), Route("/methods", list_methods), Route("/{method}", call, methods=["POST"])]
    return Starlette(routes=routes, exception_handlers={HTTPException: refuse, Exception: fail})


class ImpatientProtocol(H11Protocol):
    """uvicorn's HTTP with deadlines for the head of a request and for taking its answer; ``_body`` has the body's."""

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle  # since ``pause_writing``

    def connection_made(self, transport: Any) -> None:
        """Start the clock."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that ``pause_writing`` tells of whatever is not taken
        self._late = self.loop.call_later(REQUEST_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        """Stop the clock once a request has begun; start it with the first byte of the next one's head."""
        super().data_received(data)
        begun = self.cycle is not None and not self.cycle.response_complete
        if begun and self._late:
            self._late.cancel()
            self._late = None
        elif not begun and not self._late:
            self._late = self.loop.call_later(REQUEST_SECONDS, self.transport.close)

    def pause_writing(self) -> None:
        """Start the clock of an answer that the client has not taken; ``close`` would wait for that."""
        super().pause_writing()
        self._unread = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop it."""
        super().resume_writing()
        self._unread.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        super().connection_lost(exc)
        if self._late:
            self._late.cancel()


class GameServer(uvicorn.Server):
    """uvicorn's server, which gives up its games when it is told to end."""

    def __init__(self, actor: Actor):
        super().__init__(uvicorn.Config(make_app(actor), log_level="warning", access_log=False, http=ImpatientProtocol,
                                        timeout_graceful_shutdown=SHUTDOWN_SECONDS))  # fmt: skip
        self.actor, self.interrupted = actor, False

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Take a signal."""
        self.interrupted = self.interrupted or sig == signal.SIGINT
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End: games first, which is not done in ``handle_exit``, since what it interrupts may hold their locks."""
        self.actor.close()
        await super().shutdown(sockets)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=at_least(0, 65535), default=8765, help="0: a free one (default 8765)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--run", metavar="RUN", help="whose own games are served, too (its env.games_path)")
    parser.add_argument("--games-path", metavar="DIR", help="the same without a run: docs/adding_a_game.md")
    parser.add_argument("--opponent", default="mcts", help="of a reset that names none (default mcts)")
    parser.add_argument("--max-episodes", type=at_least(1), default=1000, help="at a time (default 1000)")
    parser.add_argument("--idle-seconds", type=at_least(0.001), default=3600,
                        help="until an episode is forgotten (default 3600)")  # fmt: skip
    parser.add_argument("--search-threads", type=at_least(0), default=0,
                        help="of searching opponents (default: one per core)")  # fmt: skip
    parser.add_argument("--max-search", type=at_least(0.001), default=1,
                        help="most that clients may search, times the game's own budget (default 1)")  # fmt: skip
    args = parser.parse_args(argv)
    files = [Path(args.run) / "run_config.json"] if args.run else []
    sets = [f"env.games_path={json.dumps(args.games_path)}"] if args.games_path else []
    try:
        load_config({"env": EnvConfig}, files, sets, skip_unknown_sections=True)
        check_games()
        with blaming("--opponent: "):
            read_task(0, 0, args.opponent, math.inf)  # the bound is for clients
    except ValueError as error:
        parser.error(str(error))
    return args


def _listen(host: str, port: int) -> socket.socket:
    # asyncio switches Nagle's algorithm off, which else delays answers by 40 ms, only for sockets that name TCP.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()  # before the address is told
    return listener


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted; 1: the address is taken, 2: bad usage, 130: interrupted."""
    setup_logging()
    args = _arguments(argv)
    try:
        listener = _listen(args.host, args.port)
    except (OSError, TypeError, UnicodeError) as error:  # of these the last two are of a name that no machine has
        why = getattr(error, "strerror", None) or error
        print(f"serve: cannot listen on {args.host} port {args.port}: {why}", file=sys.stderr)
        return 1
    if args.host not in LOOPBACK:
        print("serve: every machine that reaches this address may play: there are no passwords", file=sys.stderr)
    actor = Actor(args.opponent, args.max_episodes, args.idle_seconds, args.search_threads, args.max_search)
    server = GameServer(actor)
    host = f"[{args.host}]" if ":" in args.host else args.host
    # Scripts' & starts programs that ignore interrupts; and Python's own handler would raise one while the loop is
    # imported, where what callbacks raise is lost.
    signal.signal(signal.SIGINT, server.handle_exit)
    try:
        print(f"serving {len(games.GAMES)} games on http://{host}:{listener.getsockname()[1]}", flush=True)
        server.run(sockets=[listener])
    finally:
        actor.close()
    return 130 if server.interrupted else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # at once: the interpreter's own end would wait for searches that nobody awaits
