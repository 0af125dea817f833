"""The types that environments, players and the trainer exchange."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": ...}


@dataclass(frozen=True, slots=True)
class Task:
    """One game to play. ``(task_id, seed, opponent)`` determines everything but the player.

    ``seed`` None: it is derived from the task id. ``index`` is the global draw index: it keys the player's own random
    stream and never changes the game. ``replay``: the task was drawn because it was not won before.
    """

    task_id: int
    seed: int | None = None
    opponent: str = "random"
    index: int = 0
    replay: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What the environment shows: the user message and the legal actions of the seat to move, or the end.

    ``legal`` maps action id to action string, forced moves included (empty when done). ``score`` is in
    [0, 1] when done. ``info`` holds game (its name), seat (to move), system (the system
    message), attempt (1-based), adapter (the earlier adapter that answers, None: the current policy), history
    ([[player, action], ...], -1 = chance) and outcome (finished | forfeited, None while running); of games also
    own_seat (the task's) and history_turns (past turns that the text needs, None: all); when done also returns (None
    after a forfeit) and scores ({seat: score}; on a server of the own seat alone).
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
    """A decision that a player is asked for. ``rng_key`` is (task index, seat, decision, attempt).

    ``continues``: the next conversation of this (episode, seat) extends this one, so its cache is worth keeping.
    ``history``: the game so far, [[player, action], ...], -1 for chance; for whoever may see what is hidden.
    """

    episode: int
    seat: int
    conversation: list[Message]
    legal: dict[int, str]
    rng_key: tuple[int, ...]
    adapter: str | None = None
    continues: bool = False
    history: list[list[int]] = field(default_factory=list, compare=False)


@dataclass(frozen=True, slots=True)
class Decision:
    """One answer inside a sequence, as it was sampled.

    ``positions[t]`` indexes the token of ``Sequence.ids`` after which ``chosen[t]`` was drawn from
    ``allowed[t]`` (``allowed`` None: from the whole vocabulary); tokens without an alternative are left out.
    ``start`` and ``stop`` delimit the whole answer in ``Sequence.ids``, end-of-turn token included.
    ``logprob`` is the sum over the tokens, in nats; ``value`` was read at ``start - 1``, the last prompt token.
    ``ply``: the number of moves made before, those of chance included.
    """

    start: int = 0
    stop: int = 0
    positions: list[int] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    allowed: list[list[int]] | None = None
    token_logprobs: list[float] = field(default_factory=list)
    logprob: float = 0.0
    value: float = 0.0
    ply: int = 0
    version: int | None = None  # of the adapter, where a server answered


@dataclass(frozen=True, slots=True)
class Sequence:
    """Token ids as the model read and wrote them, and the decisions among them. The unit of a training batch.

    It never changes: a conversation that continues becomes a new sequence (``Action.extends``). The first ``shared``
    tokens are the system message, the same for every sequence of that game.
    """

    ids: list[int]
    decisions: list[Decision] = field(default_factory=list)
    shared: int = 0


@dataclass(slots=True)
class Action:
    """A player's answer. ``sequence`` is the sequence whose last decision this is (None: nothing to train on).

    ``extends``: the sequence begins with this seat's previous one and replaces it.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprob: float = 0.0
    value: float = 0.0
    sequence: Sequence | None = None
    extends: bool = False
    truncated: bool = False  # the prompt no longer fits: the episode ends here
    error: str = ""  # nobody could answer: the episode has failed


@dataclass
class Episode:
    """A played task. ``sequences[seat]`` are the sequences of each seat that the current policy played.

    ``info`` holds seat (the task's), returns and scores as in ``Step`` (None unless the game ended), history, length,
    n_decisions ({seat: decisions asked}) and retries of the seats that no opponent's adapter plays, forced (a count),
    own_end (whether such a seat was asked last); in trace also match, exact and share; if it failed only error.
    """

    task: Task
    game: str
    score: float
    outcome: str  # finished | truncated | forfeited | failed
    sequences: dict[int, list[Sequence]] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)


class PromptTooLongError(ValueError):
    """A prompt is longer than the model may read."""


class InterruptedRolloutError(Exception):
    """Raised by a player when the run should stop; nothing of the step has been applied yet."""


class Player(Protocol):
    """Anything that answers queries, many at a time, in their order."""

    def act(self, queries: Seq[Query]) -> list[Action]:
        """Return one action a query, in order."""
