"""The players that are not the model: what an opponent string means, and the bots behind it."""

from __future__ import annotations

import functools
import logging
import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Protocol

from games.base import Game

SEEDS = 2**32  # numpy's RandomState takes seeds 0 .. 2^32 - 1
UCT_C = 1.414
MAX_MEMORY_MB = 256
ALLOWED = "random, mcts, mcts:SIMSxROLLOUTS, ismcts, ismcts:SIMSxROLLOUTS, self or past:NAME"
# OpenSpiel's ResampleFromInfostate is missing in the others (liars_dice, phantom_ttt) or crashes (hearts).
RESAMPLED = ("kuhn_poker", "leduc_poker", "gin_rummy", "euchre", "bridge")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpponentSpec:
    """A parsed opponent string. ``budget`` is (simulations, rollouts a simulation), None: the game's own."""

    kind: str  # random | mcts | ismcts | self | past
    budget: tuple[int, int] | None = None
    adapter: str | None = None

    @property
    def searches(self) -> bool:
        """True for bots that think long enough to be worth a thread."""
        return self.kind in ("mcts", "ismcts")


class Bot(Protocol):
    """One seat of one episode."""

    def step(self, state: Any) -> int:
        """Return a legal action of the bot's seat."""


@functools.cache
def parse_opponent(spec: str) -> OpponentSpec:
    """Parse an opponent string such as ``mcts:200x10``.

    Raises:
        ValueError: the string is none of the allowed forms, or a number in it is 0.
    """
    if spec in ("random", "mcts", "ismcts", "self"):
        return OpponentSpec(spec)
    if match := re.fullmatch(r"(mcts|ismcts):([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", spec, re.ASCII):
        return OpponentSpec(match[1], budget=(int(match[2]), int(match[3])))
    if match := re.fullmatch(r"past:(\S+)", spec):
        return OpponentSpec("past", adapter=match[1])
    raise ValueError(f"opponent {spec!r} is not known: allowed are {ALLOWED}")


def _new_generator() -> Any:
    from numpy.random import RandomState

    return RandomState()


class Stream:
    """The draws of ``numpy.random.RandomState(seed)``, made when first used; any integer is a seed, modulo 2^32.

    Seeding a generator takes a microsecond, making one sixty: those of finished episodes are used again.
    """

    __slots__ = ("_rng", "_seed")
    _spare: ClassVar[list[Any]] = []

    def __init__(self, seed: int):
        self._seed = seed % SEEDS
        self._rng: Any = None

    def __del__(self, spare: list[Any] = _spare) -> None:
        if self._rng is not None:
            spare.append(self._rng)

    def _generator(self) -> Any:
        if self._rng is None:
            self._rng = self._spare.pop() if self._spare else _new_generator()
            self._rng.seed(self._seed)
        return self._rng

    def choice(self, actions: list[int]) -> int:
        """Return what ``RandomState.choice(actions)`` returns, at a third of the cost."""
        return actions[self._generator().randint(len(actions))]

    def weighted(self, outcomes: list[tuple[int, float]]) -> int:
        """Return what ``RandomState.choice(values, p=probabilities)`` returns for (value, probability) pairs."""
        cumulative = list(accumulate([probability for _, probability in outcomes]))
        total = cumulative[-1]
        return outcomes[bisect_right([c / total for c in cumulative], self._generator().random_sample())][0]


class RandomBot:
    """Chooses uniformly among the legal actions."""

    def __init__(self, seat: int, seed: int):
        self.seat = seat
        self._stream = Stream(seed)

    def step(self, state: Any) -> int:
        """Return a legal action of the bot's seat."""
        return self._stream.choice(state.legal_actions(self.seat))


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


def _signed(seed: int) -> int:
    """Fold a seed into the 32-bit integer that C++ takes, one to one for 0 .. 2^32 - 1."""
    seed %= SEEDS
    return seed if seed < SEEDS // 2 else seed - SEEDS


def _search_budget(game: Game, pyspiel_game: Any, spec: OpponentSpec) -> tuple[int, int] | None:
    """Return (simulations, rollouts), or None where there is nothing to search: one player, or moves at once."""
    import pyspiel

    sequential = pyspiel_game.get_type().dynamics == pyspiel.GameType.Dynamics.SEQUENTIAL
    if sequential and pyspiel_game.num_players() > 1:
        return spec.budget or game.mcts
    return None


def make_bot(game: Game, pyspiel_game: Any, spec: OpponentSpec, seat: int, seed: int) -> Bot:
    """Return a fresh bot for one seat of one episode (``self`` and ``past`` seats belong to models, not bots).

    The streams derive from the episode's seed as in the public environment's evaluation: the random bot
    from ``seed + 4 + seat``, a search from ``seed + 6 + seat`` and its rollouts from ``seed + 5 + seat``.
    ``mcts`` searches the true state, hidden cards included. ``ismcts`` does not; where nothing is hidden the
    two are the same. Games that cannot be searched get the random bot, said once in the log.

    Raises:
        ValueError: ``ismcts`` in a game whose hidden information OpenSpiel cannot resample.
    """
    import pyspiel

    budget = None if spec.kind == "random" else _search_budget(game, pyspiel_game, spec)
    if budget is None:
        if spec.searches:
            _say_once(f"{game.name} cannot be searched: its {spec.kind} opponents play at random")
        return RandomBot(seat, seed + 4 + seat)
    simulations, rollouts = budget
    evaluator = pyspiel.RandomRolloutEvaluator(rollouts, _signed(seed + 5 + seat))
    search_seed = _signed(seed + 6 + seat)
    perfect = pyspiel_game.get_type().information == pyspiel.GameType.Information.PERFECT_INFORMATION
    if spec.kind == "mcts" or perfect:
        return pyspiel.MCTSBot(
            pyspiel_game, evaluator, UCT_C, simulations, MAX_MEMORY_MB, solve=True, seed=search_seed, verbose=False
        )
    if game.short_name not in RESAMPLED:
        raise ValueError(f"opponent ismcts cannot play {game.name}: of the games that hide something, only {RESAMPLED}")
    best = pyspiel.ISMCTSFinalPolicyType.MAX_VISIT_COUNT
    return pyspiel.ISMCTSBot(
        search_seed, evaluator, UCT_C, simulations, final_policy_type=best, allow_inconsistent_action_sets=True
    )
