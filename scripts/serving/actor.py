"""The games that serve.py hosts: what clients may ask of them, search limits, expiry, and the protocol's answers."""

import asyncio
import contextlib
import math
import os
import random
import re
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

import games
from config.flags import one_line
from config.reader import blaming
from envs.affinetes import EVALUATE_PATH
from envs.config import EnvConfig
from envs.openspiel import OpenSpielEnv, derive_seed, table
from envs.opponents import SERVED, parse_opponent, searchable
from envs.types import Step, Task

ILLEGAL_REWARD = -0.01
PLAIN_SEARCH = 100, 10  # simulations, and rollouts of each, for a game whose file names no budget
MAX_SHOWN = 100  # characters of a client's input that an error message quotes
MAX_ACTION = 2**16  # characters; a longer answer is not parsed, and so is illegal
RETRYABLE = ("no_episode_id", "episode_not_found", "episode_done", "invalid_action")
# ``info`` in the answer to a request that belongs to no episode.
NO_EPISODE = dict.fromkeys(("task_id", "seed", "game_name", "llm_player_id", "opponent_type")) | {
    "path": EVALUATE_PATH, "step_count": 0, "cumulative_reward": 0.0}  # fmt: skip
INTEGER = re.compile(r"-?[0-9]{1,30}")
RECLAIM_SECONDS = 60.0  # an episode unused for this long is dropped when a new one needs its place
STOPPING = "the server is stopping"
ATTEMPTS = 10**9  # the public reset/step path never forfeits: illegal answers may be repeated without limit

CLIENT: ContextVar[Request] = ContextVar("CLIENT")  # the request being answered


class RequestError(ValueError):
    """A bad request, answered with HTTP 200 and an error object in ``info.error``."""

    def __init__(self, kind: str, message: str, episode_id: str | None = None):
        super().__init__(one_line(message))
        self.kind, self.episode_id = kind, episode_id

    def response(self) -> dict[str, Any]:
        """Return the answer, which belongs to no episode."""
        info = NO_EPISODE | {"error": _error(self.kind, str(self))}
        return _response(str(self), 0.0, True, self.episode_id, info, truncated=True)


def _not_found(episode_id: str) -> RequestError:
    return RequestError("episode_not_found", "Episode not found.", episode_id)


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"type": kind, "message": message, "retryable": kind in RETRYABLE}


class StoppedError(RuntimeError):
    """The game was dropped: nobody waits for its next position."""


class StoppableEnv(OpenSpielEnv):
    """The environment, which starts no search once ``stopped``; one already running ends with its budget."""

    stopped = False

    def _bot_action(self, seat: int, legal: list[int]) -> int:
        if self.stopped:
            raise StoppedError
        return super()._bot_action(seat, legal)


@dataclass
class HostedGame:
    """A game on the server. Whoever plays it holds ``lock``; ``used`` is when it last was, on the monotonic clock."""

    id: str
    task: Task
    pool: ThreadPoolExecutor
    env: StoppableEnv = field(default_factory=lambda: StoppableEnv(EnvConfig(), ATTEMPTS))
    step: Step | None = None  # the position to answer, or the end; None while the reset is running
    used: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def response(self, reward: float = 0.0, preface: str = "", error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer of reset, step and state; ``preface`` comes before the position's text.

        History and returns are told at the end only, and so is the other seats' share of ``step_count`` where the game
        hides anything.
        """
        assert self.step is not None
        known, done, shared = self.step.info, self.step.done, table(self.task.task_id)
        counted = [known["seat"]] if shared.hides and not done else range(shared.players)
        info = {"task_id": self.task.task_id, "seed": self.task.seed, "game_name": known["game"],
                "llm_player_id": known["seat"], "opponent_type": self.task.opponent, "path": EVALUATE_PATH,
                "step_count": sum(player in counted for player, _ in known["history"]),
                "cumulative_reward": self.step.score}  # fmt: skip
        if done:
            info |= {"returns": known["returns"], "history": known["history"]}
        if error:
            info["error"] = error
        refused = error is not None and error["type"] == "invalid_action"
        text = _legal_text(self.step) if refused else _position_text(self.step)
        return _response(_end_text(self.step) if done else preface + text, reward, done, self.id, info)


def _response(text: str, reward: float, done: bool, episode_id: str | None, info: Any, truncated: bool = False) -> dict:
    return {"observation": _encodable(text), "reward": reward, "done": done, "truncated": truncated,
            "episode_id": episode_id, "info": info}  # fmt: skip


def _position_text(step: Step) -> str:
    """The public servers' text of a position: the parts of the full prompt in another order."""
    state = step.text.removeprefix("Current State:\n").rpartition("\n\nYou are Player ")[0]
    head = f"Game: {step.info['game']}\nYou are Player {step.info['seat']}."
    return f"{head}\n\nCurrent State:\n{state}\n\n{_legal_text(step)}"


def _legal_text(step: Step) -> str:
    legal = "\n".join(f"  {action} -> {name}" for action, name in step.legal.items())
    return f"Legal Actions:\n{legal}\n\nYour choice (action ID only):"


def _end_text(step: Step) -> str:
    returns = step.info["returns"]
    result = "WIN" if step.score > 0.5 else "LOSS" if step.score < 0.5 else "DRAW"
    return (
        f"Game Over: {step.info['game']}\nYou were Player {step.info['seat']}.\n\n"
        f"Final Returns: {returns}\nYour Return: {returns[step.info['seat']]}\n"
        f"Normalized Score: {step.score:.3f}\nResult: {result}"
    )


def _encodable(text: str) -> str:
    """The text with lone surrogates, which JSONResponse cannot encode, replaced by question marks."""
    return text.encode(errors="replace").decode()


def read_task(task_id: Any, seed: Any, opponent: Any, max_search: float) -> Task:
    """Return a checked task: a random one where ``task_id`` is None, with the id's own seed where ``seed`` is None.

    ``max_search`` limits an opponent's simulations and rollouts, as a multiple of the game's own budget.
    """
    if isinstance(task_id, str) and INTEGER.fullmatch(task_id):  # public servers accept both
        task_id = int(task_id)
    for name, value in (("task_id", task_id), ("seed", seed)):
        if value is not None and type(value) is not int:
            raise RequestError("invalid_request", f"{name} {repr(value)[:MAX_SHOWN]} is not an integer")
    if not isinstance(opponent, str) or len(opponent) > MAX_SHOWN:
        raise RequestError("invalid_request", f"opponent {repr(opponent)[:MAX_SHOWN]} is not the name of one")
    if task_id is None:
        task_id = random.randrange(len(games.GAMES) * games.CONFIGS_PER_GAME)
    with blaming(raising=partial(RequestError, "invalid_game")):
        game, _ = games.decode_task_id(task_id)
    with blaming(raising=partial(RequestError, "invalid_opponent")):
        spec = parse_opponent(opponent, SERVED)
    if spec.kind in ("self", "past"):
        raise RequestError("invalid_opponent", f"opponent {opponent!r} is a model: this server plays bots only")
    if spec.solves:  # which takes up to a minute, again for every number of iterations
        raise RequestError("invalid_opponent", f"opponent {opponent!r} solves games: this server plays or searches")
    if spec.searches and (budget := spec.budget_in(game)):
        own = game.mcts or PLAIN_SEARCH
        simulations, rollouts = max_search * own[0], max_search * (own[0] * own[1])
        beyond = budget[0] > simulations or budget[0] * budget[1] > rollouts
        if beyond and searchable(table(task_id).spiel):
            raise RequestError("invalid_opponent", f"opponent {opponent!r} searches more than this server allows in "
                               f"{game.name}: {simulations:.0f} simulations, {rollouts:.0f} rollouts")  # fmt: skip
    return Task(task_id, derive_seed(task_id) if seed is None else seed, opponent)


def _held(play: Callable[..., Step], argument: Any) -> Step:
    try:
        return play(argument)
    except (StopIteration, SystemExit) as error:  # of a custom game: asyncio would wait for ever, or the game stay
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _lower_priority() -> None:
    """Give the calling thread a lower priority than those that answer requests (only Linux has one per thread)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # searching at the same priority is better than not searching
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(os.nice(0) + 5, 19))


class Actor:
    """The episodes, and the methods that clients may call. The arguments are serve.py's flags of the same names."""

    def __init__(
        self, opponent: str, max_episodes: int, idle_seconds: float, search_threads: int, max_search: float = 1.0
    ):
        self._opponent, self._max_episodes, self._idle_seconds = opponent, max_episodes, idle_seconds
        self._max_search, self._closing = max_search, asyncio.Event()
        self._episodes: dict[str, HostedGame] = {}
        # Two pools, so that games without search never wait for a search.
        self._search_pool = ThreadPoolExecutor(search_threads or os.cpu_count(), "search", initializer=_lower_priority)
        self._quick_pool = ThreadPoolExecutor(os.cpu_count(), "quick")
        methods: list[Callable[..., Any]] = [self.reset, self.step, self.state, self.stop]
        self.methods = {method.__name__: method for method in methods}

    async def reset(self, task_id: int | None = None, seed: int | None = None, opponent: str | None = None) -> dict:
        """Start a game and return its rules and the first position."""
        allowed = (self._opponent, math.inf) if opponent is None else (opponent, self._max_search)
        task = read_task(task_id, seed, *allowed)
        self._make_room()
        searches = parse_opponent(task.opponent).searches
        episode = HostedGame(uuid.uuid4().hex, task, self._search_pool if searches else self._quick_pool)
        self._episodes[episode.id] = episode
        async with episode.lock:
            with blaming(raising=partial(RequestError, "invalid_opponent")):
                step = await self._in_pool(episode, episode.env.reset, task)
        game, params = games.decode_task_id(task.task_id)
        return episode.response(step.score, f"# Game Rules\n{game.rules(params)}\n\n# Current Game State\n")

    async def step(self, action: str | None = None, episode_id: str | None = None) -> dict:
        """Play an action, given as its id or as text that ``envs.parser`` understands."""
        episode = self._find(episode_id)
        async with self._turn(episode):
            if episode.step is None or episode.step.done:
                return episode.response(error=_error("episode_done", "the episode has ended: reset starts another"))
            text = str(action) if isinstance(action, str) or type(action) is int else ""
            step = await self._in_pool(episode, episode.env.step, text if len(text) <= MAX_ACTION else "")
        if episode.step is not step:
            message = f"{repr(action)[:MAX_SHOWN]} is none of the legal actions {list(step.legal)}"
            said = (f'Invalid action: "{str(action)[:MAX_SHOWN]}"\n\nCould not parse a valid action ID. Please respond '
                    "with just the action ID number.\n\n")  # fmt: skip
            return episode.response(ILLEGAL_REWARD, said, _error("invalid_action", message))
        return episode.response(step.score)

    async def state(self, episode_id: str | None = None) -> dict:
        """Return the position without playing."""
        episode = self._find(episode_id)
        async with self._turn(episode):
            return episode.response(episode.step.score if episode.step else 0.0)

    async def stop(self, episode_id: str | None = None) -> dict:
        """Drop an episode."""
        try:
            episode = self._find(episode_id)
        except RequestError as error:
            return {"status": "ok", "stopped": False, "message": str(error)}
        self._drop(episode)
        return {"status": "ok", "stopped": True, "episode_id": episode.id}

    def close(self) -> None:
        """Drop all episodes and start no more work."""
        self._closing.set()
        for episode in list(self._episodes.values()):
            self._drop(episode)
        for pool in (self._search_pool, self._quick_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def _turn(self, episode: HostedGame) -> AsyncIterator[None]:
        """Hold the episode's lock. RequestError where the episode was dropped while this call waited for it."""
        async with episode.lock:
            if episode.env.stopped:
                raise _not_found(episode.id)
            yield

    def _drop(self, episode: HostedGame) -> None:
        episode.env.stopped = True
        self._episodes.pop(episode.id, None)

    async def _in_pool(self, episode: HostedGame, play: Callable[..., Step], argument: Any) -> Step:
        """Play in a thread. A failure drops the episode, since its position is then unknown."""
        played = asyncio.get_running_loop().run_in_executor(episode.pool, _held, play, argument)
        try:
            if episode.pool is self._search_pool:
                await self._while_awaited(played)
            step = await played
        except StoppedError as error:
            raise _not_found(episode.id) from error
        except Exception:  # from the engine or a custom game; it becomes HTTP 500
            self._drop(episode)
            raise
        if step.done or step.info["attempt"] == 1:  # a refused answer leaves the position as it was
            episode.step = step
        episode.used = time.monotonic()
        return step

    async def _while_awaited(self, played: asyncio.Future[Step]) -> None:
        """Wait for a search; HTTPException if its client disconnects or the server stops first."""
        ends = (_disconnected(CLIENT.get()), self._closing.wait())
        abandoned: list[asyncio.Future[Any]] = [asyncio.ensure_future(end) for end in ends]
        try:
            await asyncio.wait([played, *abandoned], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in abandoned:
                waiting.cancel()
        if not played.done():
            played.cancel()
            raise HTTPException(503, f"the client has disconnected, or {STOPPING}: the search is given up")

    def _find(self, episode_id: Any) -> HostedGame:
        self._expire()
        if not isinstance(episode_id, str) or not episode_id:
            raise RequestError("no_episode_id", "episode_id is missing: reset returns it")
        if episode_id not in self._episodes:
            raise _not_found(_encodable(episode_id[:MAX_SHOWN]))
        episode = self._episodes[episode_id]
        episode.used = time.monotonic()
        return episode

    def _expire(self) -> None:
        oldest = time.monotonic() - self._idle_seconds
        for episode in [*self._episodes.values()]:
            if episode.used <= oldest and not episode.lock.locked():  # locked: its opponent may be searching
                self._drop(episode)

    def _make_room(self) -> None:
        if self._closing.is_set():
            raise HTTPException(503, STOPPING)
        self._expire()
        if len(self._episodes) >= self._max_episodes:
            oldest = time.monotonic() - RECLAIM_SECONDS
            by_use = sorted(self._episodes.values(), key=lambda e: e.used)
            ended = [e for e in by_use if e.step and e.step.done]
            idle = [e for e in by_use if e.used < oldest and not e.lock.locked()]
            if not ended + idle:
                raise HTTPException(503, f"{self._max_episodes} episodes are running: stop one, or try again later")
            self._drop((ended + idle)[0])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
