"""The games of serve.py and what clients may do with them: budgets, room, and the public form of every answer."""

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
from itertools import chain
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

import games
from config.reader import blaming
from envs.affinetes import EVALUATE_PATH
from envs.client import one_line
from envs.config import EnvConfig
from envs.openspiel import OpenSpielEnv, derive_seed, table
from envs.opponents import parse_opponent
from envs.types import Step, Task

ILLEGAL_REWARD = -0.01
PLAIN_SEARCH = 100, 10  # simulations and rollouts of each in a game that names none of its own
MAX_SHOWN = 100  # characters of what a client sent, in a message
MAX_ACTION = 2**16  # characters of an answer that is read for an action
RETRYABLE = ("no_episode_id", "episode_not_found", "episode_done", "invalid_action")
# What is told of an episode that is not there.
UNKNOWN = dict.fromkeys(("task_id", "seed", "game_name", "llm_player_id", "opponent_type")) | {
    "step_count": 0, "cumulative_reward": 0.0}  # fmt: skip
INTEGER = re.compile(r"-?[0-9]{1,30}")
RECLAIM_SECONDS = 60.0  # without a call, after which a game gives way to a new one where there is no room
ATTEMPTS = 10**9  # the public reset/step path never forfeits: an illegal answer may be repeated without end

CLIENT: ContextVar[Request] = ContextVar("CLIENT")  # of the call that is being answered


class RequestError(ValueError):
    """A request that is answered with an error object in ``info.error``."""

    def __init__(self, kind: str, message: str, episode_id: str | None = None):
        super().__init__(message)
        self.kind, self.episode_id = kind, episode_id

    def response(self) -> dict[str, Any]:
        """Return the answer to a request that no episode can give."""
        info = UNKNOWN | {"error": _error(self.kind, str(self))}
        return _response(str(self), 0.0, done=True, truncated=True, episode_id=self.episode_id, info=info)


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"type": kind, "message": message, "retryable": kind in RETRYABLE}


class StoppedError(RuntimeError):
    """Nobody waits for the rest of this game."""


class StoppableEnv(OpenSpielEnv):
    """The environment, which begins no further search once ``stopped``; one that runs is bounded by its budget."""

    stopped = False

    def _bot_action(self, seat: int, legal: list[int]) -> int:
        if self.stopped:
            raise StoppedError
        return super()._bot_action(seat, legal)


@dataclass
class HostedGame:
    """A game on the server. ``lock`` lets one request at a time play it; ``used`` is a monotonic time in seconds."""

    id: str
    task: Task
    pool: ThreadPoolExecutor
    env: StoppableEnv = field(default_factory=lambda: StoppableEnv(EnvConfig(), ATTEMPTS))
    step: Step | None = None  # the position to answer, or the end; None until the reset is through
    used: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def response(self, reward: float = 0.0, before: str = "", error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what reset, step and state answer; the position's text begins with ``before``.

        History, returns and how often others moved are told once nothing is hidden any more.
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
        text = _end_text(self.step) if done else before + _position_text(self.step)
        if error and error["type"] == "invalid_action":
            text = f"{before}{_legal_text(self.step)}"
        return _response(text, reward, done, episode_id=self.id, info=info)


def _response(
    text: str, reward: float, done: bool, truncated: bool = False, episode_id: str | None = None, info: Any = None
) -> dict[str, Any]:
    return {"observation": _whole(text), "reward": reward, "done": done, "truncated": truncated,
            "episode_id": episode_id, "info": info}  # fmt: skip


def _position_text(step: Step) -> str:
    """Return the public form of a position; the full prompt holds the same in another order."""
    description = step.text.removeprefix("Current State:\n").rpartition("\n\nYou are Player ")[0]
    return (
        f"Game: {step.info['game']}\nYou are Player {step.info['seat']}.\n\nCurrent State:\n{description}\n\n"
        + _legal_text(step)
    )


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


def _whole(text: str) -> str:
    """The text, with half characters, which no answer can hold, as question marks."""
    return text.encode(errors="replace").decode()


def read_task(task_id: Any, seed: Any, opponent: Any, max_search: float) -> Task:
    """Return a checked task; one without an id is drawn, one without a seed has the seed of its id."""
    if isinstance(task_id, str) and INTEGER.fullmatch(task_id):  # public servers take both
        task_id = int(task_id)
    for name, value in (("task_id", task_id), ("seed", seed)):
        if value is not None and type(value) is not int:
            raise RequestError("invalid_request", f"{name} {one_line(repr(value), MAX_SHOWN)} is not an integer")
    if not isinstance(opponent, str) or len(opponent) > MAX_SHOWN:
        raise RequestError("invalid_request", f"opponent {one_line(repr(opponent), MAX_SHOWN)} is not the name of one")
    if task_id is None:
        task_id = random.randrange(len(games.GAMES) * games.CONFIGS_PER_GAME)
    with blaming(raising=partial(RequestError, "invalid_game")):
        game, _ = games.decode_task_id(task_id)
    with blaming(raising=partial(RequestError, "invalid_opponent")):
        spec = parse_opponent(opponent)
    if spec.kind in ("self", "past"):
        raise RequestError("invalid_opponent", f"opponent {opponent!r} is a model: this server plays bots only")
    if spec.solves:  # would take a minute of whom it is asked, again for every number of iterations
        raise RequestError("invalid_opponent", f"opponent {opponent!r} solves games: this server plays or searches")
    if spec.searches and (budget := spec.budget_in(game)):
        own = game.mcts or PLAIN_SEARCH
        simulations, rollouts = (max_search * most for most in (own[0], own[0] * own[1]))
        if budget[0] > simulations or budget[0] * budget[1] > rollouts:
            raise RequestError("invalid_opponent", f"opponent {opponent!r} searches more than this server allows in "
                               f"{game.name}: {simulations:.0f} simulations, {rollouts:.0f} rollouts")  # fmt: skip
    return Task(task_id, derive_seed(task_id) if seed is None else seed, opponent)


def _step_back() -> None:
    """Let the calling thread give way to those that answer requests (Linux knows priorities of threads)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it is better to search at the same priority than not at all
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(os.nice(0) + 5, 19))


class Actor:
    """The episodes, and the methods that clients may call on them."""

    def __init__(
        self, opponent: str, max_episodes: int, idle_seconds: float, search_threads: int, max_search: float = 1.0
    ):
        self._opponent, self._max_episodes, self._idle_seconds = opponent, max_episodes, idle_seconds
        self._max_search, self._closing = max_search, asyncio.Event()
        self._episodes: dict[str, HostedGame] = {}
        # Two pools, so that games without search never wait for one with.
        self._search_pool = ThreadPoolExecutor(search_threads or os.cpu_count(), "search", initializer=_step_back)
        self._quick_pool = ThreadPoolExecutor(os.cpu_count(), "quick")
        self.methods: dict[str, Callable[..., Any]] = {
            "reset": self.reset, "step": self.step, "state": self.state, "stop": self.stop,
        }  # fmt: skip

    async def reset(self, task_id: int | None = None, seed: int | None = None, opponent: str | None = None) -> dict:
        """Start a game and return its rules and the first position."""
        most = math.inf if opponent is None else self._max_search  # whoever serves may choose what is searched
        task = read_task(task_id, seed, self._opponent if opponent is None else opponent, most)
        self._make_room()
        searches = parse_opponent(task.opponent).searches
        episode = HostedGame(uuid.uuid4().hex, task, self._search_pool if searches else self._quick_pool)
        self._episodes[episode.id] = episode
        game, params = games.decode_task_id(task.task_id)
        rules = f"# Game Rules\n{game.rules(params)}\n\n# Current Game State\n"
        async with episode.lock:
            with blaming(raising=partial(RequestError, "invalid_opponent")):
                step = await self._in_pool(episode, episode.env.reset, task)
        return episode.response(step.score, rules)

    async def step(self, action: str | None = None, episode_id: str | None = None) -> dict:
        """Play an action: its id, or text that the parser of the evaluate path understands."""
        episode = self._find(episode_id)
        async with self._turn(episode):
            if episode.step is None or episode.step.done:
                return episode.response(error=_error("episode_done", "the episode has ended: reset starts another"))
            text = str(action) if isinstance(action, str) or type(action) is int else ""
            step = await self._in_pool(episode, episode.env.step, text if len(text) <= MAX_ACTION else "")
        if episode.step is not step:
            message = f"{one_line(repr(action), MAX_SHOWN)} is none of the legal actions {list(step.legal)}"
            said = (f'Invalid action: "{str(action)[:MAX_SHOWN]}"\n\nCould not parse a valid action ID. Please respond '
                    "with just the action ID number.\n\n")  # fmt: skip
            return episode.response(ILLEGAL_REWARD, said, _error("invalid_action", message))
        return episode.response(step.score)

    async def state(self, episode_id: str | None = None) -> dict:
        """Return the position again; nothing is played."""
        episode = self._find(episode_id)
        async with self._turn(episode):
            return episode.response(episode.step.score if episode.step else 0.0)

    async def stop(self, episode_id: str | None = None) -> dict:
        """Forget an episode."""
        try:
            episode = self._find(episode_id)
        except RequestError as error:
            return {"status": "ok", "stopped": False, "message": str(error)}
        self._drop(episode)
        return {"status": "ok", "stopped": True, "episode_id": episode.id}

    def close(self) -> None:
        """Give up all games and start no more work."""
        self._closing.set()
        for episode in list(self._episodes.values()):
            self._drop(episode)
        for pool in (self._search_pool, self._quick_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def _turn(self, episode: HostedGame) -> AsyncIterator[None]:
        """One call at a time; who waited for another learns if that one's search was given up, which ends the game."""
        async with episode.lock:
            if episode.env.stopped:
                raise RequestError("episode_not_found", "Episode not found.", episode.id)
            yield

    def _drop(self, episode: HostedGame) -> None:
        episode.env.stopped = True
        self._episodes.pop(episode.id, None)

    async def _in_pool(self, episode: HostedGame, play: Callable[..., Step], argument: Any) -> Step:
        """Play in a thread. What fails ends the episode: its position is no longer known."""
        played = asyncio.get_running_loop().run_in_executor(episode.pool, play, argument)
        try:
            if episode.pool is self._search_pool:
                await self._while_awaited(played)
            step = await played
        except StoppedError as error:
            raise RequestError("episode_not_found", "Episode not found.", episode.id) from error
        except Exception:  # of the engine, or of a custom game: told as HTTP 500
            self._drop(episode)
            raise
        if step.done or step.info["attempt"] == 1:  # an answer that was refused leaves the position as it was
            episode.step = step
        episode.used = time.monotonic()
        return step

    async def _while_awaited(self, played: asyncio.Future[Step]) -> None:
        """Wait until a search is through; HTTPException if its client hangs up, or the server ends, before that."""
        left: list[asyncio.Future[Any]] = [asyncio.ensure_future(_hang_up(CLIENT.get())),
                                           asyncio.ensure_future(self._closing.wait())]  # fmt: skip
        try:
            await asyncio.wait([played, *left], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in left:
                waiting.cancel()
        if played.cancelled() or not played.done():
            played.cancel()
            raise HTTPException(503, "nobody waits for this search any more, or the server ends")

    def _find(self, episode_id: Any) -> HostedGame:
        self._expire()
        if not isinstance(episode_id, str) or not episode_id:
            raise RequestError("no_episode_id", "episode_id is missing: it is told by reset")
        if episode_id not in self._episodes:
            raise RequestError("episode_not_found", "Episode not found.", _whole(episode_id[:MAX_SHOWN]))
        episode = self._episodes[episode_id]
        episode.used = time.monotonic()
        return episode

    def _expire(self) -> None:
        oldest = time.monotonic() - self._idle_seconds
        for episode in [*self._episodes.values()]:
            if episode.used <= oldest and not episode.lock.locked():  # its opponent may be thinking
                self._drop(episode)

    def _make_room(self) -> None:
        self._expire()
        if len(self._episodes) >= self._max_episodes:
            unused = time.monotonic() - RECLAIM_SECONDS
            known = sorted(self._episodes.values(), key=lambda e: e.used)
            idle = (e for e in known if e.used < unused and not e.lock.locked())
            ended = (e for e in known if e.step and e.step.done)
            gives_way = next(chain(ended, idle), None)
            if gives_way is None:
                raise HTTPException(503, f"{self._max_episodes} episodes are running: stop one, or try again later")
            self._drop(gives_way)


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
