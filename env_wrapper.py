"""The world as the trainer sees it: tasks, the environment protocol, the action parser and the one episode loop."""

from __future__ import annotations

import contextlib
import os
import sysconfig
import traceback
from collections import deque
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import settings
from envs.parser import parse_action as parse_action

RUNNING = "running"
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": ...}

ALLOWED = {
    "env_type": ("openspiel", "trace"),
    "env_mode": ("local", "url", "docker"),
    "prompt": ("full", "compact"),
    "answer_mode": ("constrained", "free"),
    "protocol": ("native", "affinetes"),
}


def _place(error: Exception) -> str:
    """Where a built-in exception was raised, outside the libraries; others are made to be read as they are."""
    if type(error).__module__ != "builtins":
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if not f.filename.startswith(LIBRARIES)), frames[-1])
    return f" ({os.path.basename(frame.filename)}:{frame.lineno})"


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class EnvConfig:
    """How games are played and shown. Opponents and games come with the tasks."""

    env_type: str = "openspiel"  # openspiel | trace
    allowed_game_indices: list[int] = field(default_factory=list, hash=False)  # of those of the stages; []: all
    opponent: str = ""  # instead of the stages' own; empty: theirs
    env_mode: str = "local"  # local | url | docker (public affinetes servers)
    prompt: str = "full"  # full: rules and named actions; compact: terse state, no rules
    answer_mode: str = "constrained"  # constrained | free
    history_turns: int | str = "auto"  # past turns kept in the conversation; "all"; "auto": the game's default
    protocol: str = "native"  # affinetes: forced moves are asked too, as the public environment does
    max_attempts: int = 3  # answers per decision before the episode is forfeited
    games_at_once: int = 0  # games open together: the policy keeps what it has read of each; 0: all of a call
    search_threads: int = 0  # threads of the searching opponents, or of the calls to a server; 0: one per core
    env_url: str = ""  # url: the server, for example http://127.0.0.1:8765
    env_timeout: float = 600.0  # url, docker: seconds a call may take, repetitions included
    env_image: str = ""  # docker: the image of the server
    env_host: str = ""  # docker: a remote machine with Docker, ssh://user@host; empty: this machine
    use_vllm: bool = False  # training's games are played through vLLM servers, see docs/scaling.md
    vllm_base_url: str | list[str] = "http://127.0.0.1:8000/v1"  # one server, or several
    vllm_timeout: float = settings.knob(600.0, above=0)  # seconds until an answer counts as lost, repetitions included
    max_staleness: int = settings.knob(0, min=0)  # updates by which the weights that play may be behind
    trace: dict[str, Any] = field(default_factory=dict, hash=False)  # of env_type trace: envs.trace.TraceConfig

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)!r} is not allowed: choose {' or '.join(allowed)}")
        for name, least in (("max_attempts", 1), ("search_threads", 0), ("games_at_once", 0)):
            if not _is_count(getattr(self, name), least):
                raise ValueError(f"{name} {getattr(self, name)!r} is not allowed: an integer >= {least}")
        if self.history_turns not in ("auto", "all") and not _is_count(self.history_turns, 0):
            raise ValueError(f'history_turns {self.history_turns!r} is not allowed: "auto", "all" or an integer >= 0')
        if self.env_mode != "local" or os.environ.get("OPENSPIEL_AGENTS_PATH"):
            from envs.contract import check_config

            check_config(self)
        if self.env_type == "trace":
            from envs.trace import TraceConfig

            settings.make(TraceConfig, self.trace, "trace")


@dataclass(frozen=True, slots=True)
class Task:
    """One game to play. ``(task_id, seed, opponent)`` determines everything that is not the player.

    ``seed`` None derives it from the task id. ``index`` is the global draw index: it keys the player's
    own random stream and never changes the game.
    """

    task_id: int
    seed: int | None = None
    opponent: str = "random"
    index: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What the environment shows: the user message and the legal actions of the seat to move, or the end.

    ``legal`` maps action id to action string, forced moves included (empty when done). ``score`` is in
    [0, 1] when done. ``info`` holds seat, returns, history ([[player, action], ...], -1 = chance), outcome
    (finished | forfeited, None while running), system (the system message), attempt (1-based), adapter
    (None: the current policy), game (its name).
    """

    text: str
    legal: dict[int, str]
    done: bool
    score: float
    info: dict[str, Any]


class Env(Protocol):
    """One episode at a time: ``reset``, then ``step`` until ``done``. A closed or finished episode refuses steps."""

    def reset(self, task: Task) -> Step:
        """Start a task and return its first decision (or its end)."""

    def step(self, text: str) -> Step:
        """Answer the current decision with raw text and return the next one, a retry, or the end."""

    def close(self) -> None:
        """Release what the episode holds; may be called at any time, also twice."""


@dataclass(frozen=True, slots=True)
class Query:
    """A decision asked of a player. ``rng_key`` is (task index, seat, decision, attempt).

    ``continues``: the next conversation of this (episode, seat) extends this one, so what was read is worth keeping.
    ``history``: the game so far, [[player, action], ...] with -1 for chance: for teachers, who may know what is hidden.
    """

    episode: int
    seat: int
    conversation: list[Message]
    legal: dict[int, str]
    rng_key: tuple[int, ...]
    adapter: str | None = None
    continues: bool = False
    history: list[list[int]] = field(default_factory=list, compare=False)


@dataclass(slots=True)
class Decision:
    """One answer inside a sequence, as it was sampled (T_a answer tokens, of which some left no choice).

    ``positions[t]`` indexes the token of ``Sequence.ids`` after which ``chosen[t]`` was drawn from
    ``allowed[t]`` (``allowed`` None: from the whole vocabulary); tokens without an alternative are left out.
    ``start`` and ``stop`` delimit the whole answer in ``Sequence.ids``, end-of-turn token included.
    ``logprob`` is the sum over the tokens, in nats; ``value`` was read at ``start - 1``, the last prompt token.
    """

    start: int = 0
    stop: int = 0
    positions: list[int] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    allowed: list[list[int]] | None = None
    token_logprobs: list[float] = field(default_factory=list)
    logprob: float = 0.0
    value: float = 0.0
    version: int | None = None  # of the adapter that answered, where a server did


@dataclass(slots=True)
class Sequence:
    """Token ids as the model read and wrote them, and the decisions in it. The unit of a training batch.

    The first ``shared`` tokens are the system message, the same for every sequence of that game.
    """

    ids: list[int]
    decisions: list[Decision] = field(default_factory=list)
    shared: int = 0


@dataclass(slots=True)
class Action:
    """A player's answer. ``sequence`` is the sequence whose last decision this is (None: nothing to train on)."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprob: float = 0.0
    value: float = 0.0
    sequence: Sequence | None = None
    truncated: bool = False  # the prompt no longer fits: the episode ends here
    error: str = ""  # nobody could answer: the episode has failed


@dataclass
class Episode:
    """A played task. ``sequences[seat]`` are the sequences of each seat the current policy controlled.

    ``info``: seat (the task's), returns and scores of all seats (None unless the game ended), history, length,
    n_decisions ({seat: decisions asked}), forced and retries (counts); of trace match, exact and share too; of a
    failed episode only error.
    """

    task: Task
    game: str
    score: float
    outcome: str  # finished | truncated | forfeited | failed
    sequences: dict[int, list[Sequence]] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)


class Player(Protocol):
    """Anything that answers queries, many at a time, in their order."""

    def act(self, queries: Seq[Query]) -> list[Action]:
        """Return one action a query, in order."""


def _checked(env_config: EnvConfig | dict[str, Any]) -> EnvConfig:
    return env_config if isinstance(env_config, EnvConfig) else settings.make(EnvConfig, env_config, "env")


def make_env(env_config: EnvConfig | dict[str, Any]) -> Env:
    """Return a new environment: one episode at a time, as configured.

    Raises:
        ValueError: unknown key or a value that is not allowed.
    """
    config = _checked(env_config)
    if config.env_mode != "local":
        from envs.affinetes import RemoteEnv

        return RemoteEnv(config)
    if config.env_type == "trace":
        from envs.trace import TraceEnv

        return TraceEnv(config, config.trace)
    from envs.openspiel import OpenSpielEnv

    return OpenSpielEnv(config)


class _Conversation:
    """What one seat has read and written. A turn is a decision with all its attempts."""

    def __init__(self, system: str):
        self.messages: list[Message] = [{"role": "system", "content": system}]
        self.turn_starts: list[int] = []

    def ask(self, text: str, attempt: int) -> None:
        if attempt == 1:
            self.turn_starts.append(len(self.messages))
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def window(self, past_turns: int | None) -> list[Message]:
        """Return the system message, the last ``past_turns`` turns (None: all) and the current one."""
        if past_turns is None or past_turns >= len(self.turn_starts) - 1:
            return self.messages.copy()
        return self.messages[:1] + self.messages[self.turn_starts[-1 - past_turns] :]


def _past_turns(config: EnvConfig, game: str) -> int | None:
    """Return how many past turns the conversation keeps (None: all)."""
    if isinstance(config.history_turns, int):
        return config.history_turns
    if config.history_turns == "all" or config.env_type != "openspiel":
        return None
    from games import GAMES

    return next((known.history_turns for known in GAMES if known.name == game), None)


class _Run:
    """One episode on its way: the environment, its seats' conversations and the Episode they become."""

    def __init__(self, number: int, task: Task, config: EnvConfig):
        self.number, self.config = number, config
        self.env = make_env(config)
        self.step = Step("", {}, False, 0.0, {})
        self.conversations: dict[int, _Conversation] = {}
        self.past_turns: int | None = None
        self.n_decisions: dict[int, int] = {}
        self.forced = self.retries = 0
        self.episode = Episode(task, "unknown", 0.0, RUNNING)

    @property
    def running(self) -> bool:
        return self.episode.outcome == RUNNING

    def query(self) -> Query:
        info = self.step.info
        seat = info["seat"]
        key = (self.episode.task.index, seat, self.n_decisions[seat] - 1, info["attempt"])
        conversation = self.conversations[seat].window(self.past_turns)
        continues = self.past_turns is None or len(self.conversations[seat].turn_starts) <= self.past_turns
        return Query(
            self.number, seat, conversation, self.step.legal, key, info["adapter"], continues, info.get("history", [])
        )

    def advance(self, action: Action | None) -> None:
        """Start the episode (None) or play the action, then the forced moves. What fails ends this episode only."""
        try:
            if action is None:
                self._show(self.env.reset(self.episode.task))
            elif action.error:
                return self._fail(action.error)
            else:
                self._collect(action.sequence)
                if action.truncated:
                    return self._finish("truncated")
                self._answer(action.text)
            while self.running and self._is_forced():
                self._answer(str(next(iter(self.step.legal))))
        except Exception as error:  # whatever an environment raises costs its own episode and no other
            self._fail(f"{type(error).__name__}: {error}{_place(error)}")

    def _fail(self, error: str) -> None:
        self.episode.outcome = "failed"
        self.episode.info["error"] = error
        self.abandon()

    def abandon(self) -> None:
        """Close the environment whatever it says."""
        with contextlib.suppress(Exception):
            self.env.close()

    def _is_forced(self) -> bool:
        return self.config.protocol != "affinetes" and len(self.step.legal) == 1

    def _collect(self, sequence: Sequence | None) -> None:
        if sequence is None or self.step.info["adapter"] is not None:
            return
        sequences = self.episode.sequences.setdefault(self.step.info["seat"], [])
        if not any(sequence is known for known in sequences):
            sequences.append(sequence)

    def _answer(self, text: str) -> None:
        self.conversations[self.step.info["seat"]].answer(text)
        self._show(self.env.step(text))

    def _show(self, step: Step) -> None:
        info = step.info
        if not self.step.info:
            self.episode.game = info["game"]
            self.past_turns = _past_turns(self.config, info["game"])
        self.step = step
        if step.done:
            return self._finish(info["outcome"], step.score)
        seat, attempt = info["seat"], info["attempt"]
        if seat not in self.conversations:
            self.conversations[seat] = _Conversation(info["system"])
        self.conversations[seat].ask(step.text, attempt)
        if attempt > 1:
            self.retries += 1
        elif self._is_forced():
            self.forced += 1
        else:
            self.n_decisions[seat] = self.n_decisions.get(seat, 0) + 1

    def _finish(self, outcome: str, score: float = 0.0) -> None:
        self.env.close()
        info = self.step.info
        kept = {key: info.get(key) for key in ("seat", "returns", "scores", "history")}
        kept |= {key: info[key] for key in ("match", "exact", "share") if key in info}  # of trace
        counted = {"n_decisions": self.n_decisions, "forced": self.forced, "retries": self.retries}
        self.episode.outcome, self.episode.score = outcome, score
        self.episode.info = kept | counted | {"length": len(info["history"])}


def _is_slow(config: EnvConfig, tasks: Seq[Task]) -> bool:
    """Return True where a step of the environment is worth a thread: remote, running programs, or searching."""
    if config.env_mode != "local" or config.env_type != "openspiel":
        return True
    from envs.opponents import parse_opponent

    return any(parse_opponent(opponent).searches for opponent in {task.opponent for task in tasks})


def play(env_config: EnvConfig | dict[str, Any], player: Player, tasks: Seq[Task]) -> list[Episode]:
    """Play the tasks to their ends, all games together, and return their episodes in task order.

    Each round asks ``player.act`` once for the decisions of all running games. Where environments are slow
    (searching opponents), two fixed halves of the tasks alternate: the player answers one while threads step
    the other. Which queries share a call depends on the tasks alone, never on the clock or the thread count.
    If the player has ``release(episodes)``, it is told the numbers of the episodes that have ended.

    An exception inside an environment makes that episode ``failed`` (``info["error"]``) and no other.

    Raises:
        ValueError: bad configuration or opponent, or a player that does not answer every query once.
    """
    config = _checked(env_config)
    size = config.games_at_once or len(tasks)
    if size < len(tasks):
        return [e for i in range(0, len(tasks), size) for e in play(config, player, tasks[i : i + size])]
    slow = _is_slow(config, tasks)
    runs = [_Run(number, task, config) for number, task in enumerate(tasks)]
    halves = [runs[0::2], runs[1::2]] if slow else [runs]
    pool = ThreadPoolExecutor(config.search_threads or os.cpu_count()) if slow else None
    step_all: Any = pool.map if pool else map
    try:
        stepping = [step_all(_Run.advance, half, [None] * len(half)) for half in halves]
        while any(halves):
            for i, half in enumerate(halves):
                deque(stepping[i], maxlen=0)  # wait for, or with the lazy built-in map run, the half's steps
                halves[i] = active = [run for run in half if run.running]
                _release(player, [run.number for run in half if not run.running])
                stepping[i] = step_all(_Run.advance, active, _act(player, active))
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
        for run in runs:
            if run.running:
                run.abandon()
    return [run.episode for run in runs]


def _act(player: Player, runs: list[_Run]) -> list[Action]:
    if not runs:
        return []
    actions = player.act([run.query() for run in runs])
    if len(actions) != len(runs):
        raise ValueError(f"the player answered {len(actions)} of {len(runs)} queries: one action a query, in order")
    return actions


def _release(player: Player, episodes: list[int]) -> None:
    if episodes and (release := getattr(player, "release", None)):
        release(episodes)
