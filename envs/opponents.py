"""The opponents: what an opponent string means, and the bots that play."""

import functools
import logging
import math
import re
import threading
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Protocol

from config.reader import blaming
from games.base import Game
from games.gin_rummy import KNOCK

SEEDS = 2**32  # numpy's RandomState takes seeds 0 .. 2^32 - 1
UCT_C = 1.414
MOST_WORLDS = 100  # drawn for a simulation: 20 at most were needed in 1,300 positions of euchre
MAX_MEMORY_MB = 256
CFR_ITERATIONS = 300  # leduc_poker: 3 s, NashConv 0.005
SERVED = "random, mcts, mcts_light, mcts:SIMSxROLLOUTS, ismcts, ismcts:SIMSxROLLOUTS"  # by scripts/serve.py
ALLOWED = f"{SERVED}, perfect, cfr, cfr:ITERATIONS; in training also self and past"
# Games whose hidden information can be resampled for a search. OpenSpiel cannot do it in phantom_ttt; in bridge one
# sample takes 0.2 s (it solves the deal); hearts has four sides.
RESAMPLED = ("kuhn_poker", "leduc_poker", "liars_dice", "gin_rummy", "euchre")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpponentSpec:
    """A parsed opponent string. ``budget`` is (simulations, rollouts per simulation), None: the game's own.

    ``light``: the game's own simulations with a tenth of its rollouts; how well that plays: docs/results.md, "Search".
    """

    kind: str  # random | mcts | ismcts | perfect | cfr | self | past
    budget: tuple[int, int] | None = None
    adapter: str | None = None
    light: bool = False
    iterations: int = CFR_ITERATIONS  # of cfr

    def budget_in(self, game: Game) -> tuple[int, int] | None:
        """Return (simulations, rollouts per simulation) of a search in ``game``; None if it cannot be searched."""
        if self.light and game.mcts:
            return game.mcts[0], max(1, game.mcts[1] // 10)
        return self.budget or game.mcts

    @property
    def searches(self) -> bool:
        """Whether a move takes long enough to be worth a thread."""
        return self.kind in ("mcts", "ismcts")

    @property
    def solves(self) -> bool:
        """Whether it plays a solution of the whole game, which must be small for that (``solution``)."""
        return self.kind in ("perfect", "cfr")


class Bot(Protocol):
    """One seat of one episode."""

    def step(self, state: Any) -> int:
        """Return a legal action of the bot's seat."""


@functools.lru_cache(maxsize=1024)  # bounded, because a server's clients may send any number of them
def parse_opponent(spec: str, allowed: str = ALLOWED) -> OpponentSpec:
    """Parse an opponent string such as ``mcts:200x10``; ValueError, which lists those ``allowed``, if it is none."""
    if spec in ("random", "mcts", "ismcts", "perfect", "cfr", "self"):
        return OpponentSpec(spec)
    if spec == "mcts_light":
        return OpponentSpec("mcts", light=True)
    if match := re.fullmatch(r"(mcts|ismcts):([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", spec, re.ASCII):
        return OpponentSpec(match[1], budget=(int(match[2]), int(match[3])))
    if match := re.fullmatch(r"cfr:([1-9][0-9]{0,8})", spec, re.ASCII):
        return OpponentSpec("cfr", iterations=int(match[1]))
    if match := re.fullmatch(r"past:(\S+)", spec):
        return OpponentSpec("past", adapter=match[1])
    if spec == "past":
        raise ValueError("opponent 'past' is a run's own past selves: only curriculum.stages can name it, to train on")
    raise ValueError(f"opponent {spec!r} is not known: allowed are {allowed}")


def check_served(spec: str) -> None:
    """Raise ValueError if servers cannot play the opponent."""
    if spec == "past" or parse_opponent(spec).kind not in ("random", "mcts", "ismcts"):
        raise ValueError(f"opponent {spec!r} cannot play on a server: choose from {SERVED}")


@functools.lru_cache(maxsize=256)  # a game has few kinds of chance nodes
def _cumulative(probabilities: tuple[float, ...]) -> list[float]:
    sums = list(accumulate(probabilities))
    return [c / sums[-1] for c in sums]


class Stream:
    """The draws of ``numpy.random.RandomState(seed)``; any integer is a seed, modulo 2^32.

    Seeding a generator takes two microseconds, making one a hundred: those of finished episodes are reused.
    """

    _spare: ClassVar[list[Any]] = []

    def __init__(self, seed: int):
        from numpy.random import RandomState

        self._rng = self._spare.pop() if self._spare else RandomState()
        self._rng.seed(seed % SEEDS)

    def __del__(self, spare: list[Any] = _spare) -> None:
        spare.append(self._rng)

    def choice(self, actions: list[int]) -> int:
        """Return what ``RandomState.choice(actions)`` returns, at a third of the cost."""
        return actions[self._rng.randint(len(actions))]

    def uniform(self) -> float:
        """Return a number in [0, 1)."""
        return self._rng.random_sample()

    def weighted(self, outcomes: list[tuple[int, float]]) -> int:
        """Return what ``RandomState.choice(values, p=probabilities)`` returns for (value, probability) pairs."""
        return outcomes[bisect_right(_cumulative(tuple([p for _, p in outcomes])), self.uniform())][0]


class RandomBot:
    """Chooses uniformly among the legal actions."""

    def __init__(self, seat: int, seed: int):
        self.seat = seat
        self._stream = Stream(seed)

    def step(self, state: Any, legal: list[int] | None = None) -> int:
        """Return a legal action of the bot's seat; ``legal``: all of them, where they are known already."""
        return self._stream.choice(legal or state.legal_actions(self.seat))


class TableBot:
    """Plays a solved game's policy; see ``solution``."""

    def __init__(self, table: dict[str, dict[int, float]], seat: int, seed: int):
        self.seat, self._table = seat, table
        self._stream = Stream(seed + 6 + seat)

    def step(self, state: Any) -> int:
        """Return a legal action of the bot's seat."""
        from envs.exact import info_key

        return self._stream.weighted(list(self._table[info_key(state, self.seat)].items()))


_one_at_a_time = threading.Lock()  # what several threads would do at once: solve the same game, say the same line


def solution(game: Game, pyspiel_game: Any, spec: OpponentSpec) -> dict[str, dict[int, float]]:
    """Return the policy of ``perfect`` or ``cfr``, solved once per process; ValueError if it cannot play the game."""
    from envs import exact

    with _one_at_a_time, blaming(f"opponent {spec.kind} cannot play {game.name}: ", raising=ValueError):
        if spec.kind == "perfect":
            return exact.perfect_table(pyspiel_game)
        return exact.equilibrium_table(pyspiel_game, spec.iterations)


class InformationSetSearch:
    """Information-set Monte Carlo tree search (Cowling, Powley, Whitehouse 2012), which does not see hidden cards.

    (Except in euchre: OpenSpiel resamples the hands, but not the kitty and the dealer's discard. It also deals suits
    that a player has shown not to have, so worlds are drawn until one fits.)
    Every simulation plays in a world resampled from what the seat knows, and a tree node is what the player to move
    knows, so that no choice depends on what a player cannot see. Seats of the same parity are one side, and the
    sides are zero-sum. ``pyspiel.ISMCTSBot`` is not used because its choices follow the order of a hash map salted
    anew in every process, so that a seed does not determine its moves.
    """

    def __init__(self, pyspiel_game: Any, seat: int, simulations: int, rollouts: int, seed: int):
        import pyspiel

        self.seat = seat
        self._simulations = simulations
        self._stream = Stream(seed + 6 + seat)
        self._dice, self._suits = (pyspiel_game.get_type().short_name == name for name in ("liars_dice", "euchre"))
        # A search of one simulation is one call of the C++ evaluator, which has no binding of its own.
        evaluator = pyspiel.RandomRolloutEvaluator(rollouts, _signed(seed + 5 + seat))
        self._leaf = pyspiel.MCTSBot(pyspiel_game, evaluator, UCT_C, 1, 1, solve=False, seed=0, verbose=False)
        self._safe_leaf = SafeRollouts(rollouts, seed + 5 + seat) if has_dead_ends(pyspiel_game) else None

    def step(self, state: Any) -> int:
        """Return the action tried most often."""
        self._tree: dict[str, dict[int, list[float]]] = {}  # information state -> action -> [visits, total value]
        self._low, self._high = math.inf, -math.inf
        for _ in range(self._simulations):
            self._simulate(self._resample(state, self.seat, self._stream))
        tried = self._tree[state.information_state_string(self.seat)]
        if not tried:  # a single simulation ends at the root
            return self._stream.choice(state.legal_actions() if self._safe_leaf is None else _playable(state))
        return max(sorted(tried), key=lambda action: tried[action][0])

    def _resample(self, state: Any, seat: int, stream: Stream) -> Any:
        if self._dice:
            return _reroll_dice(state, seat, stream)
        for _ in range(MOST_WORLDS):
            world = state.resample_from_infostate(seat, stream.uniform)
            if not self._suits or _is_legal(world):
                break
        return world

    def _simulate(self, world: Any) -> None:
        path: list[tuple[int, list[float]]] = []
        while not world.is_terminal():
            if world.is_chance_node():
                world.apply_action(self._stream.weighted(world.chance_outcomes()))
                continue
            player = world.current_player()
            node = self._tree.get(known := world.information_state_string(player))
            if node is None:
                self._tree[known] = {}
                return self._back_up(path, self._evaluate(world, player))
            action = self._select(node, world.legal_actions() if self._safe_leaf is None else _playable(world))
            path.append((player, node.setdefault(action, [0, 0.0])))
            world.apply_action(action)
        self._back_up(path, world.returns()[0])

    def _evaluate(self, world: Any, player: int) -> float:
        """Return the mean result of random play for seat 0's side; ``player`` is to move."""
        if self._safe_leaf:
            return self._safe_leaf.evaluate(world)[0]
        value = self._leaf.mcts_search(world).total_reward
        return value if player % 2 == 0 else -value

    def _select(self, node: dict[int, list[float]], legal: list[int]) -> int:
        if untried := [action for action in legal if action not in node]:
            return self._stream.choice(untried)
        log_visits = math.log(sum(node[action][0] for action in legal))
        explore = UCT_C * (self._high - self._low) / 2  # UCT_C is meant for values in [-1, 1]

        def upper_bound(action: int) -> float:
            visits, total = node[action]
            return total / visits + explore * math.sqrt(log_visits / visits)

        return max(legal, key=upper_bound)

    def _back_up(self, path: list[tuple[int, list[float]]], value: float) -> None:
        """Add a value for seat 0's side to the statistics of the actions that led to it."""
        self._low, self._high = min(self._low, value), max(self._high, value)
        for player, tried in path:
            tried[0] += 1
            tried[1] += value if player % 2 == 0 else -value


def _is_legal(world: Any) -> bool:
    """Whether the moves that led to a position were legal."""
    state = world.get_game().new_initial_state()
    for action in world.history():
        if action not in state.legal_actions():
            return False
        state.apply_action(action)
    return True


def has_dead_ends(pyspiel_game: Any) -> bool:
    """Return whether a game has positions that are not terminal and have no legal action.

    Only gin rummy with hands of eight (in games of one's own: five, two) does: with nine cards in three melds of three
    a player may knock, but may then find that every discard leaves too much deadwood. OpenSpiel's C++ search ends the
    process there.
    """
    return pyspiel_game.get_type().short_name == "gin_rummy" and pyspiel_game.get_parameters()["hand_size"] % 3 == 2


def _playable(state: Any) -> list[int]:
    """Return gin rummy's legal actions, without a knock into a dead end."""
    legal = state.legal_actions()
    if KNOCK in legal and not state.child(KNOCK).legal_actions():
        legal.remove(KNOCK)
    return legal


class SafeRollouts:
    """Random play to the end, like ``pyspiel.RandomRolloutEvaluator``, for games with dead ends."""

    def __init__(self, rollouts: int, seed: int):
        self._rollouts = rollouts
        self._stream = Stream(seed)

    def evaluate(self, state: Any) -> list[float]:
        """Return each seat's mean return over the rollouts from ``state``."""
        results = [self._play_out(state.clone()) for _ in range(self._rollouts)]
        return [sum(returns) / self._rollouts for returns in zip(*results, strict=True)]

    def prior(self, state: Any) -> list[tuple[int, float]]:
        """Return (action, prior probability) of the actions that a search may try."""
        if state.is_chance_node():
            return state.chance_outcomes()
        actions = _playable(state)
        return [(action, 1 / len(actions)) for action in actions]

    def _play_out(self, state: Any) -> list[float]:
        while not state.is_terminal():
            if state.is_chance_node():
                state.apply_action(self._stream.weighted(state.chance_outcomes()))
            else:
                state.apply_action(self._stream.choice(_playable(state)))
        return state.returns()


def _reroll_dice(state: Any, seat: int, stream: Stream) -> Any:
    """Return liar's dice with the same bids, the other players' dice rolled anew; player p has the p-th ``numdice``."""
    game = state.get_game()
    dice = game.get_parameters()["numdice"]
    world = game.new_initial_state()
    for i, action in enumerate(state.history()):
        hidden = world.is_chance_node() and i // dice != seat
        world.apply_action(stream.weighted(world.chance_outcomes()) if hidden else action)
    return world


class LockedSearch:
    """A C++ search that holds Python's global lock: searching a game written in Python without it ends the process."""

    def __init__(self, search: Any):
        self._search = search

    def step(self, state: Any) -> int:
        """Return the action that the search's own ``step`` would."""
        best = self._search.mcts_search(state).best_child()
        return best.action if best else state.legal_actions()[0]  # a single simulation leaves no child


def _may_be_python(pyspiel_game: Any) -> bool:
    wraps = any(isinstance(value, dict) for value in pyspiel_game.get_parameters().values())  # another game
    return wraps or type(pyspiel_game).__module__.partition(".")[0] != "pyspiel"


_say_once = functools.cache(logger.warning)


def _signed(seed: int) -> int:
    """Map a seed to the signed 32-bit integer that C++ takes, one to one for 0 .. 2^32 - 1."""
    return (seed + SEEDS // 2) % SEEDS - SEEDS // 2


def searchable(pyspiel_game: Any) -> bool:
    """Return whether search bots search in a game: players take turns, and are rewarded only at the end."""
    import pyspiel

    kind = pyspiel_game.get_type()
    in_turn = kind.dynamics == pyspiel.GameType.Dynamics.SEQUENTIAL and pyspiel_game.num_players() > 1
    return in_turn and kind.reward_model == pyspiel.GameType.RewardModel.TERMINAL


def make_bot(game: Game, pyspiel_game: Any, spec: OpponentSpec, seat: int, seed: int) -> Bot:
    """Return a new bot for one seat of one episode (``self`` and ``past`` seats belong to models, not bots).

    Random streams are seeded as in the public environment's evaluation: the random bot with ``seed + 4 + seat``, a
    search with ``seed + 6 + seat`` and its rollouts with ``seed + 5 + seat``. ``mcts`` searches the true state, hidden
    cards included. ``ismcts`` does not; where nothing is hidden the two are the same. In games that cannot be
    searched they play at random, which is logged once.

    ValueError: ``ismcts`` in a game whose hidden information cannot be resampled; ``perfect`` or ``cfr`` in a game
    that they cannot play (``solution``).
    """
    if spec.solves:
        return TableBot(solution(game, pyspiel_game, spec), seat, seed)
    if not spec.searches:
        return RandomBot(seat, seed + 4 + seat)
    import pyspiel

    kind = pyspiel_game.get_type()
    budget = spec.budget_in(game) if searchable(pyspiel_game) else None
    if budget is None:
        with _one_at_a_time:
            _say_once(f"{game.name} cannot be searched: its {spec.kind} opponents play at random")
        return RandomBot(seat, seed + 4 + seat)
    simulations, rollouts = budget
    if spec.kind == "mcts" and has_dead_ends(pyspiel_game):
        from numpy.random import RandomState
        from open_spiel.python.algorithms import mcts  # two to three times slower, but rollouts can avoid dead ends

        safe, generator = SafeRollouts(rollouts, seed + 5 + seat), RandomState((seed + 6 + seat) % SEEDS)
        return mcts.MCTSBot(pyspiel_game, UCT_C, simulations, safe, random_state=generator)
    if spec.kind == "mcts" or kind.information == pyspiel.GameType.Information.PERFECT_INFORMATION:
        evaluator = pyspiel.RandomRolloutEvaluator(rollouts, _signed(seed + 5 + seat))
        options = {"solve": True, "seed": _signed(seed + 6 + seat), "verbose": False}
        search = pyspiel.MCTSBot(pyspiel_game, evaluator, UCT_C, simulations, MAX_MEMORY_MB, **options)
        return LockedSearch(search) if _may_be_python(pyspiel_game) else search
    if game.short_name not in RESAMPLED:
        able = ", ".join(RESAMPLED)
        raise ValueError(f"opponent ismcts cannot play {game.name}: of the games with hidden information only {able}")
    if game.short_name != "euchre" and pyspiel_game.num_players() != 2:
        players = pyspiel_game.num_players()
        raise ValueError(f"opponent ismcts cannot play {game.name} of {players} players: it needs two sides")
    return InformationSetSearch(pyspiel_game, seat, simulations, rollouts, seed)
