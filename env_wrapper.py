"""The trainer's view of the environments: ``make_env``, and ``play``, the only episode loop. Types are in ``envs``."""

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Sequence as Seq
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any

import games
from config.reader import make
from envs import Action, Decision, Env, EnvConfig, Episode, Message, Player, Query, Sequence, Step, Task
from envs.opponents import parse_opponent
from envs.parser import parse_action, without_thinking
from envs.trace import TraceEnv
from utils import POLL_SECONDS

__all__ = [
    "Action", "Decision", "Env", "EnvConfig", "Episode", "Message", "Player", "Query", "Sequence", "Step", "Task",
    "check_games", "make_env", "parse_action", "play",
]  # fmt: skip

RUNNING = "running"
LEAVING_SECONDS = 2.0  # to close all open games after a signal
CALLS_AT_ONCE = 32  # to a server of games; searches take one thread per core
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def _place(error: BaseException) -> str:
    """Return where a built-in exception was raised, outside the libraries; other types explain themselves."""
    if type(error).__module__ != "builtins":
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if not f.filename.startswith(LIBRARIES)), frames[-1])
    return f" ({os.path.basename(frame.filename)}:{frame.lineno})"


def check_games() -> None:
    """Check the user's own games by playing them, once per process; ConfigError names file, line and fault."""
    if games.OWN:
        from envs.contract import check_own_games

        check_own_games()


def _checked(env_config: EnvConfig | dict[str, Any]) -> EnvConfig:
    config = env_config if isinstance(env_config, EnvConfig) else make(EnvConfig, env_config, "env")
    check_games()  # last: making a configuration adds its games
    return config


def make_env(env_config: EnvConfig | dict[str, Any]) -> Env:
    """Return a new environment, as configured; ValueError: an unknown key or a value that is not allowed."""
    config = _checked(env_config)
    if config.env_mode != "local":
        from envs.affinetes import RemoteEnv, RemoteTrace

        return RemoteTrace(config) if config.env_type == "trace" else RemoteEnv(config)
    if config.env_type == "trace":
        return TraceEnv(config)
    from envs.openspiel import OpenSpielEnv

    return OpenSpielEnv(config)


class _Conversation:
    """The messages of one seat. A turn is a decision with all its attempts."""

    def __init__(self, system: str):
        self.messages: list[Message] = [{"role": "system", "content": system}]
        self.turn_starts: list[int] = []

    def ask(self, text: str, attempt: int) -> None:
        if attempt == 1:
            self.turn_starts.append(len(self.messages))
        self.messages.append({"role": "user", "content": text})

    def window(self, past_turns: int | None) -> list[Message]:
        """Return the system message, the last ``past_turns`` turns (None: all) and the current one."""
        if past_turns is None or past_turns >= len(self.turn_starts) - 1:
            return self.messages.copy()
        return self.messages[:1] + self.messages[self.turn_starts[-1 - past_turns] :]


class _Ongoing:
    """A running episode: the environment, the seats' conversations and the Episode that results."""

    def __init__(self, number: int, task: Task, config: EnvConfig):
        self.number, self.config = number, config
        self.env = make_env(config)
        self.step = Step("", {}, False, 0.0, {})
        self.conversations: dict[int, _Conversation] = {}
        self.past_turns: int | None = None
        self.n_decisions: dict[int, int] = {}
        self.own: set[int] = set()  # seats that the current policy plays
        self.forced = self.retries = 0
        self.episode = Episode(task, "unknown", 0.0, RUNNING)

    @property
    def running(self) -> bool:
        return self.episode.outcome == RUNNING

    def query(self) -> Query:
        info, seat = self.step.info, self.step.info["seat"]
        key = (self.episode.task.index, seat, self.n_decisions[seat] - 1, info["attempt"])
        conversation, history = self.conversations[seat], info.get("history", [])
        messages = conversation.window(self.past_turns)
        continues = self.past_turns is None or len(conversation.turn_starts) <= self.past_turns
        return Query(self.number, seat, messages, self.step.legal, key, info["adapter"], continues, history)

    def advance(self, action: Action | None) -> None:
        """Start the episode (None) or play the action, then forced moves. Any failure ends this episode only."""
        try:
            if action is None:
                self._show(self.env.reset(self.episode.task))
            elif action.error:
                return self._fail(action.error)
            else:
                self._collect(action)
                if action.truncated:  # if an opponent's prompt no longer fits, the game counts as undecided
                    seat = self.step.info["seat"]
                    return self._finish("truncated", 0.0 if seat in self.own else 0.5, seat)
                self._answer(action.text)
            while self.running and self._is_forced():
                self._answer(str(next(iter(self.step.legal))))
        except (Exception, SystemExit) as error:  # whatever an environment raises ends its own episode only
            self._fail(f"{type(error).__name__}: {error}{_place(error)}")

    def _fail(self, error: str) -> None:
        self.episode.outcome = "failed"
        self.episode.info["error"] = error
        self.abandon()

    def abandon(self) -> None:
        """Close the environment, whatever that raises."""
        with contextlib.suppress(Exception, SystemExit):
            self.env.close()

    def _is_forced(self) -> bool:
        return self.config.protocol != "affinetes" and len(self.step.legal) == 1

    def _collect(self, action: Action) -> None:
        """Keep the current policy's sequence; one that extends the seat's previous one replaces it."""
        if action.sequence is None or self.step.info["adapter"] is not None:
            return
        sequences = self.episode.sequences.setdefault(self.step.info["seat"], [])
        if action.extends:
            sequences.pop()
        sequences.append(action.sequence)

    def _answer(self, text: str) -> None:
        public = self.config.protocol == "affinetes"  # where a model does not see its earlier thinking
        said = {"role": "assistant", "content": without_thinking(text) if public else text}
        self.conversations[self.step.info["seat"]].messages.append(said)
        self._show(self.env.step(text))

    def _show(self, step: Step) -> None:
        info = step.info
        if not self.step.info:
            self.episode.game = info["game"]
            self.past_turns = self.config.past_turns(info.get("history_turns"))
        if not step.done and info["adapter"] is None:
            self.own.add(info["seat"])
        last, self.step = self.step.info.get("seat"), step
        if step.done:
            return self._finish(info["outcome"], step.score, last)
        seat, attempt = info["seat"], info["attempt"]
        self.conversations.setdefault(seat, _Conversation(info["system"])).ask(step.text, attempt)
        if attempt > 1:
            self.retries += seat in self.own
        elif self._is_forced():
            self.forced += 1
        else:
            self.n_decisions[seat] = self.n_decisions.get(seat, 0) + 1

    def _finish(self, outcome: str, score: float, last: int | None) -> None:
        self.env.close()
        info = self.step.info
        self.episode.outcome, self.episode.score = outcome, score
        kept = {"seat": info.get("own_seat", info.get("seat"))}
        kept |= {key: info.get(key) for key in ("returns", "scores", "history")}
        kept |= {key: info[key] for key in ("match", "exact", "share") if key in info}  # of trace
        asked = {seat: n for seat, n in self.n_decisions.items() if seat in self.own}
        counted = {"n_decisions": asked, "forced": self.forced, "retries": self.retries, "own_end": last in self.own}
        self.episode.info = kept | counted | {"length": len(info["history"])}


def play(env_config: EnvConfig | dict[str, Any], player: Player, tasks: Seq[Task], first: int = 0) -> list[Episode]:
    """Play the tasks to the end, ``games_at_once`` at a time (0: all), and return their episodes in the same order.

    Each round asks ``player.act`` once for the decisions of all running games. Where a step is slow (servers, programs,
    searches), two fixed halves of the tasks alternate: the player answers one while threads step the other.
    Which queries share a call depends on the tasks alone, never on the clock or the thread count.
    If the player has ``release(episodes)``, it is called with the numbers of the episodes that have ended; the first
    task's is ``first``. If it has ``leave_if_stopped()``, that is called while waiting for threads. An exception of the
    player's ends the games at once.

    An exception inside an environment makes that episode ``failed`` (``info["error"]``) and no other. ValueError: bad
    configuration or opponent, or a player that does not answer every query once.
    """
    config = _checked(env_config)
    size = config.games_at_once or len(tasks)
    if size < len(tasks):
        return [e for i in range(0, len(tasks), size) for e in play(config, player, tasks[i : i + size], first + i)]
    slow = config.env_mode != "local" or config.env_type != "openspiel"
    slow = slow or any(parse_opponent(opponent).searches for opponent in {task.opponent for task in tasks})
    runs = [_Ongoing(number, task, config) for number, task in enumerate(tasks, first)]
    halves = [runs[0::2], runs[1::2]] if slow else [runs]
    pool = ThreadPoolExecutor(CALLS_AT_ONCE if config.env_mode != "local" else os.cpu_count()) if slow else None
    left = True  # by an exception
    try:
        stepping = [_step_all(half, [None] * len(half), pool) for half in halves]
        while any(halves):
            for i, half in enumerate(halves):
                _wait(stepping[i], player)
                halves[i] = active = [run for run in half if run.running]
                if (ended := [run.number for run in half if not run.running]) and hasattr(player, "release"):
                    player.release(ended)
                actions = player.act([run.query() for run in active]) if active else []
                if len(actions) != len(active):
                    said = f"the player answered {len(actions)} of {len(active)} queries"
                    raise ValueError(f"{said}: one action a query, in order")
                stepping[i] = _step_all(active, actions, pool)
        left = False
    finally:
        if pool:  # after a signal or an error, do not wait for a search, which may take minutes
            pool.shutdown(wait=not left, cancel_futures=True)
        _abandon([run for run in runs if run.running], LEAVING_SECONDS if left else None)
    return [run.episode for run in runs]


def _abandon(runs: list[_Ongoing], seconds: float | None) -> None:
    """Close all environments at once, waiting ``seconds`` at most: a hanging server must not keep a run from saving."""
    pool = ThreadPoolExecutor(max(1, len(runs)))
    wait([pool.submit(run.abandon) for run in runs], seconds)
    pool.shutdown(wait=seconds is None)


def _step_all(runs: list[_Ongoing], actions: Seq[Action | None], pool: Executor | None) -> list[Future[None]]:
    if pool:
        return [pool.submit(run.advance, action) for run, action in zip(runs, actions, strict=True)]
    for run, action in zip(runs, actions, strict=True):
        run.advance(action)
    return []


def _wait(stepping: list[Future[None]], player: Player) -> None:
    """Wait for the threads that step one half."""
    leave_if_stopped = getattr(player, "leave_if_stopped", lambda: None)
    while wait(stepping, POLL_SECONDS).not_done:
        leave_if_stopped()
    for step in stepping:
        step.result()  # raises what ``advance`` did not catch
