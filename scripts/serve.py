"""Serve the games over the HTTP protocol of the public affinetes environments.

    python scripts/serve.py --port 8765
    python scripts/serve.py --port 8765 --opponent random --max-episodes 200 --idle-seconds 600

Routes: GET /health, GET /methods, POST /call {"method": ..., "args": [...], "kwargs": {...}} and POST /{method}, where
method is reset(task_id, seed, opponent), step(action, episode_id), state(episode_id) or stop(episode_id). What differs
from the public servers, and why, is listed in docs/compatibility.md.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import math
import os
import random
import signal
import socket
import sys
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import games
from env_wrapper import EnvConfig, Step, Task
from envs.affinetes import EVALUATE_PATH
from envs.openspiel import OpenSpielEnv, derive_seed
from envs.opponents import parse_opponent

ILLEGAL_REWARD = -0.01
MAX_BODY_BYTES = 2**20
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ATTEMPTS = 10**9  # the public reset/step path never forfeits: an illegal answer may be repeated without end


class RequestError(ValueError):
    """A request that is answered with an error object in ``info.error``."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def _error(kind: str, message: str, retryable: bool = False) -> dict[str, Any]:
    return {"type": kind, "message": message, "retryable": retryable}


@dataclass
class Episode:
    """A game on the server. ``lock`` lets one request at a time play it; ``used`` is a monotonic time in seconds."""

    id: str
    task: Task
    pool: ThreadPoolExecutor
    env: OpenSpielEnv = field(default_factory=lambda: OpenSpielEnv(EnvConfig(max_attempts=ATTEMPTS)))
    step: Step | None = None  # the position to answer, or the end; None until the reset is through
    used: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def response(self, reward: float = 0.0, rules: str = "", error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what reset, step and state answer. History and returns are told once nothing is hidden any more."""
        assert self.step is not None
        known, done = self.step.info, self.step.done
        info = {"task_id": self.task.task_id, "seed": self.task.seed, "game_name": known["game"],
                "llm_player_id": known["seat"], "opponent_type": self.task.opponent, "path": EVALUATE_PATH,
                "step_count": sum(player >= 0 for player, _ in known["history"]),
                "cumulative_reward": self.step.score}  # fmt: skip
        if done:
            info |= {"returns": known["returns"], "history": known["history"]}
        if error:
            info["error"] = error
        text = _end_text(self.step) if done else rules + _position_text(self.step)
        return _response(text, reward, done, episode_id=self.id, info=info)


def _response(
    text: str, reward: float, done: bool, truncated: bool = False, episode_id: str | None = None, info: Any = None
) -> dict[str, Any]:
    return {"observation": text, "reward": reward, "done": done, "truncated": truncated, "episode_id": episode_id,
            "info": info or {}}  # fmt: skip


def _position_text(step: Step) -> str:
    """Return the public form of a position; the full prompt holds the same in another order."""
    description = step.text.removeprefix("Current State:\n").rpartition("\n\nYou are Player ")[0]
    legal = "\n".join(f"  {action} -> {name}" for action, name in step.legal.items())
    return (
        f"Game: {step.info['game']}\nYou are Player {step.info['seat']}.\n\nCurrent State:\n{description}\n\n"
        f"Legal Actions:\n{legal}\n\nYour choice (action ID only):"
    )


def _end_text(step: Step) -> str:
    returns = step.info["returns"]
    result = "WIN" if step.score > 0.5 else "LOSS" if step.score < 0.5 else "DRAW"
    return (
        f"Game: {step.info['game']}\nFinal Returns: {returns}\nYour Return: {returns[step.info['seat']]}\n"
        f"Normalized Score: {step.score:.3f}\nResult: {result}"
    )


def _task(task_id: Any, seed: Any, opponent: Any) -> Task:
    """Return a checked task; one without an id is drawn, one without a seed has the seed of its id."""
    for name, value in (("task_id", task_id), ("seed", seed)):
        if value is not None and type(value) is not int:
            raise RequestError("invalid_request", f"{name} {value!r} is not an integer")
    if not isinstance(opponent, str):
        raise RequestError("invalid_request", f"opponent {opponent!r} is not a string")
    if task_id is None:
        task_id = random.randrange(len(games.GAMES) * games.CONFIGS_PER_GAME)
    try:
        games.decode_task_id(task_id)
    except ValueError as error:
        raise RequestError("invalid_game", str(error)) from error
    try:
        kind = parse_opponent(opponent).kind
    except ValueError as error:
        raise RequestError("invalid_opponent", str(error)) from error
    if kind in ("self", "past"):
        raise RequestError("invalid_opponent", f"opponent {opponent!r} is a model: this server plays bots only")
    return Task(task_id, derive_seed(task_id) if seed is None else seed, opponent)


def _step_back() -> None:
    """Let the calling thread give way to those that answer requests (Linux knows priorities of threads)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)


class Actor:
    """The episodes, and the methods that clients may call on them."""

    def __init__(self, opponent: str, max_episodes: int, idle_seconds: float, search_threads: int):
        self._opponent, self._max_episodes, self._idle_seconds = opponent, max_episodes, idle_seconds
        self._episodes: OrderedDict[str, Episode] = OrderedDict()  # the longest unused first
        # Two pools, so that games without search never wait for one with.
        self._search_pool = ThreadPoolExecutor(search_threads or os.cpu_count(), "search", initializer=_step_back)
        self._quick_pool = ThreadPoolExecutor(os.cpu_count(), "quick")
        self.methods: dict[str, Callable[..., Any]] = {
            "reset": self.reset, "step": self.step, "state": self.state, "stop": self.stop,
        }  # fmt: skip

    async def reset(self, task_id: int | None = None, seed: int | None = None, opponent: str | None = None) -> dict:
        """Start a game and return its rules and the first position."""
        task = _task(task_id, seed, self._opponent if opponent is None else opponent)
        self._make_room()
        searches = parse_opponent(task.opponent).searches
        episode = Episode(uuid.uuid4().hex, task, self._search_pool if searches else self._quick_pool)
        self._episodes[episode.id] = episode
        game, params = games.decode_task_id(task.task_id)
        rules = f"# Game Rules\n{game.rules(params)}\n\n# Current Game State\n"
        async with episode.lock:
            try:
                step = await self._in_pool(episode, episode.env.reset, task)
            except ValueError as error:
                raise RequestError("invalid_opponent", str(error)) from error
        return episode.response(step.score, rules)

    async def step(self, action: str | None = None, episode_id: str | None = None) -> dict:
        """Play an action: its id, or text that the parser of the evaluate path understands."""
        episode = self._find(episode_id)
        async with episode.lock:
            if episode.step is None or episode.step.done:
                return episode.response(error=_error("episode_done", "the episode has ended: reset starts another"))
            text = str(action) if isinstance(action, str) or type(action) is int else ""
            step = await self._in_pool(episode, episode.env.step, text)
        if step.info["attempt"] > 1:
            message = f"{repr(action)[:100]} is none of the legal actions {list(step.legal)}"
            return episode.response(ILLEGAL_REWARD, error=_error("invalid_action", message, retryable=True))
        return episode.response(step.score)

    async def state(self, episode_id: str | None = None) -> dict:
        """Return the position again; nothing is played."""
        episode = self._find(episode_id)
        async with episode.lock:
            return episode.response()

    async def stop(self, episode_id: str | None = None) -> dict:
        """Forget an episode."""
        try:
            episode = self._find(episode_id)
        except RequestError as error:
            return {"status": "ok", "stopped": False, "message": str(error)}
        del self._episodes[episode.id]
        return {"status": "ok", "stopped": True, "episode_id": episode.id}

    def close(self) -> None:
        """Start no more work."""
        for pool in (self._search_pool, self._quick_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _in_pool(self, episode: Episode, play: Callable[..., Step], argument: Any) -> Step:
        """Play in a thread. What fails ends the episode: its position is no longer known."""
        try:
            step = await asyncio.get_running_loop().run_in_executor(episode.pool, play, argument)
        except Exception:
            self._episodes.pop(episode.id, None)
            raise
        if step.info["attempt"] == 1:  # an answer that was refused leaves the position as it was
            episode.step = step
        episode.used = time.monotonic()
        return step

    def _find(self, episode_id: Any) -> Episode:
        self._expire()
        if not isinstance(episode_id, str) or not episode_id:
            raise RequestError("no_episode_id", "episode_id is missing: it is told by reset")
        if episode_id not in self._episodes:
            raise RequestError("episode_not_found", "Episode not found.")
        self._episodes.move_to_end(episode_id)
        episode = self._episodes[episode_id]
        episode.used = time.monotonic()
        return episode

    def _expire(self) -> None:
        oldest = time.monotonic() - self._idle_seconds
        while self._episodes:
            episode = next(iter(self._episodes.values()))
            if episode.used > oldest:
                break
            if episode.lock.locked():  # its opponent is thinking
                episode.used = time.monotonic()
                self._episodes.move_to_end(episode.id)
            else:
                del self._episodes[episode.id]

    def _make_room(self) -> None:
        self._expire()
        if len(self._episodes) >= self._max_episodes:
            ended = next((e.id for e in self._episodes.values() if e.step and e.step.done), None)
            if ended is None:
                raise HTTPException(503, f"{self._max_episodes} episodes are running: stop one, or try again later")
            del self._episodes[ended]


async def _body(request: Request) -> Any:
    """Return the JSON object of a request's body; no body is an empty one."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    try:
        data = json.loads(body) if body else {}
    except (ValueError, RecursionError) as error:
        raise HTTPException(422, f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise HTTPException(422, "the body is not a JSON object")
    return data


def _signature(method: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(method, eval_str=True)


def _check_arguments(name: str, method: Callable[..., Any], args: list, kwargs: dict) -> None:
    try:
        _signature(method).bind(*args, **kwargs)
    except TypeError as error:
        raise RequestError("invalid_request", f"{name}{_signature(method)}: {error}") from error


async def _invoke(actor: Actor, name: Any, args: Any, kwargs: Any) -> JSONResponse:
    if name not in actor.methods:
        raise HTTPException(404, f"no method {name!r}: there are {', '.join(actor.methods)}")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise HTTPException(422, "args must be a list and kwargs an object")
    method = actor.methods[name]
    try:
        _check_arguments(name, method, args, kwargs)
        result = await method(*args, **kwargs)
    except RequestError as error:
        info = {"error": _error(error.kind, str(error))}
        result = _response(str(error), 0.0, done=True, truncated=True, info=info)
    return JSONResponse({"status": "success", "result": result, "error": None})


def make_app(actor: Actor) -> Starlette:
    """Return the ASGI application."""

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def list_methods(request: Request) -> JSONResponse:
        methods = [{"name": name, "signature": str(_signature(method)), "source": "Actor",
                    "endpoint": f"POST /{name}"} for name, method in actor.methods.items()]  # fmt: skip
        usage = {
            "sdk_style": 'POST /call {"method": "reset", "args": [], "kwargs": {...}}',
            "restful_style": 'POST /reset {"task_id": 0, ...}',
        }
        return JSONResponse({"methods": methods, "usage": usage})

    async def call(request: Request) -> JSONResponse:
        data = await _body(request)
        if not isinstance(data.get("method"), str):
            raise HTTPException(422, 'the body needs a "method"')
        return await _invoke(actor, data["method"], data.get("args", []), data.get("kwargs", {}))

    async def call_method(request: Request) -> JSONResponse:
        data = await _body(request)
        explicit = {"args": [], "kwargs": {}} | data if "args" in data or "kwargs" in data else {"kwargs": data}
        return await _invoke(actor, request.path_params["method"], explicit.get("args", []), explicit["kwargs"])

    async def refuse(request: Request, error: Any) -> JSONResponse:
        return JSONResponse({"detail": error.detail}, error.status_code)

    async def fail(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": f"{type(error).__name__}: {error}"}, 500)

    routes = [
        Route("/health", health), Route("/methods", list_methods),
        Route("/call", call, methods=["POST"]), Route("/{method}", call_method, methods=["POST"]),
    ]  # fmt: skip
    return Starlette(routes=routes, exception_handlers={HTTPException: refuse, Exception: fail})


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=8765, help="0: a free one (default 8765)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--opponent", default="mcts", help="of a reset that names none (default mcts)")
    parser.add_argument("--max-episodes", type=int, default=1000, help="at a time (default 1000)")
    parser.add_argument("--idle-seconds", type=float, default=3600, help="until an episode is forgotten (default 3600)")
    parser.add_argument("--search-threads", type=int, default=0, help="of searching opponents (default: one per core)")
    args = parser.parse_args(argv)
    limits = (
        ("--port", args.port, 0 <= args.port < 65536, "0 to 65535"),
        ("--max-episodes", args.max_episodes, args.max_episodes > 0, "1 or more"),
        ("--idle-seconds", args.idle_seconds, 0 < args.idle_seconds < math.inf, "more than 0"),
        ("--search-threads", args.search_threads, args.search_threads >= 0, "0 or more"),
    )
    for name, value, sound, allowed in limits:
        if not sound:
            parser.error(f"{name} {value} is not allowed: {allowed}")
    try:
        EnvConfig()  # checks the user's own games
        _task(0, 0, args.opponent)
    except RequestError as error:
        parser.error(f"--opponent: {error}")
    except ValueError as error:
        parser.error(str(error))
    return args


def _listen(host: str, port: int) -> socket.socket:
    # asyncio switches Nagle's algorithm off, which else delays answers by 40 ms, only for sockets that name TCP.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted; 1: the address is taken, 2: bad usage, 130: interrupted."""
    args = _arguments(argv)
    try:
        listener = _listen(args.host, args.port)
    except OSError as error:
        print(f"serve: cannot listen on {args.host} port {args.port}: {error.strerror or error}", file=sys.stderr)
        return 1
    if args.host not in LOOPBACK:
        print("serve: every machine that reaches this address may play: there are no passwords", file=sys.stderr)
    actor = Actor(args.opponent, args.max_episodes, args.idle_seconds, args.search_threads)
    server = uvicorn.Server(uvicorn.Config(make_app(actor), log_level="warning", access_log=False))
    host = f"[{args.host}]" if ":" in args.host else args.host
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's & starts programs that ignore it
    try:
        print(f"serving {len(games.GAMES)} games on http://{host}:{listener.getsockname()[1]}", flush=True)
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        return 130
    finally:
        actor.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
