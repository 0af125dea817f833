"""The world as the trainer sees it: tasks, the environment protocol, the action parser and the one episode loop."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": ...}


@dataclass(frozen=True)
class EnvConfig:
    """How games are played and shown. Opponents and games come with the tasks."""

    env_type: str = "openspiel"  # openspiel | trace
    env_mode: str = "local"  # local | url | docker (public affinetes servers)
    prompt: str = "full"  # full: rules and named actions; compact: terse state, no rules
    answer_mode: str = "constrained"  # constrained | free
    history_turns: int | str = "auto"  # past turns kept in the conversation; "all"; "auto": the game's default
    protocol: str = "native"  # affinetes: forced moves are asked too, as the public environment does
    max_attempts: int = 3  # answers per decision before the episode is forfeited
    search_threads: int = 0  # threads of the searching opponents; 0: one per core


@dataclass(frozen=True)
class Task:
    """One game to play. ``(task_id, seed, opponent)`` determines everything that is not the player.

    ``seed`` None derives it from the task id. ``index`` is the global draw index: it keys the player's
    own random stream and never changes the game.
    """

    task_id: int
    seed: int | None = None
    opponent: str = "random"
    index: int = 0


@dataclass(frozen=True)
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

    def reset(self, task: Task) -> Step: ...
    def step(self, text: str) -> Step: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Query:
    """A decision asked of a player. ``rng_key`` is (task index, seat, decision, attempt).

    ``continues``: the next conversation of this (episode, seat) will extend this one, so what was read is worth keeping.
    """

    episode: int
    seat: int
    conversation: list[Message]
    legal: dict[int, str]
    rng_key: tuple[int, ...]
    adapter: str | None = None
    continues: bool = False


@dataclass
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


@dataclass
class Sequence:
    """Token ids as the model read and wrote them, and the decisions in it. The unit of a training batch.

    The first ``shared`` tokens are the system message, the same for every sequence of that game.
    """

    ids: list[int]
    decisions: list[Decision] = field(default_factory=list)
    shared: int = 0


@dataclass
class Action:
    """A player's answer. ``sequence`` is the sequence whose last decision this is (None: nothing to train on)."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprob: float = 0.0
    value: float = 0.0
    sequence: Sequence | None = None
    truncated: bool = False  # the prompt no longer fits: the episode ends here


@dataclass
class Episode:
    """A played task. ``sequences[seat]`` are the sequences of each seat the current policy controlled."""

    task: Task
    game: str
    score: float
    outcome: str  # finished | truncated | forfeited | failed
    sequences: dict[int, list[Sequence]] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)


class Player(Protocol):
    """Anything that answers queries, many at a time, in their order."""

    def act(self, queries: Seq[Query]) -> list[Action]: ...
