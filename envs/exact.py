"""Exact values in small games: a policy against uniform random, the best response to that, NashConv, and solutions.

A policy is turned into a table once (one batched query of every information state); everything after that is exact
arithmetic without sampling. Games with hidden information use OpenSpiel's C++ algorithms on the whole history tree.
Perfect-information games are solved on the graph of distinct positions instead, because their information state in
OpenSpiel is the history, and tic_tac_toe has 549,946 histories but only 5,478 positions.

Values are expected returns in the game's own units. They are exact for a policy whose answer depends on the
information state alone. Where something is hidden, that state implies what the seat has read and answered before.
Where nothing is, many histories lead to one position, and a policy whose prompt carries the conversation is
represented by its answer without one.

Solutions and information states are found once and shared: copy one before you change it.
"""

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, wraps
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import numpy as np
import pyspiel

MAX_HISTORIES = 200_000  # decision and chance nodes of a game with hidden information (liars_dice with 1 die: 147,463)
MAX_MOVES = 100  # of such a game: the histories of a longer one are nearly always more, and slow to walk
MAX_POSITIONS = 20_000  # distinct positions of a perfect-information game, terminal ones included (hex 3x3: 5,514)

logger = logging.getLogger(__name__)

State = Any  # pyspiel.State
SpielGame = Any  # pyspiel.Game
TabularPolicy = dict[str, dict[int, float]]  # information state key -> {legal action: probability}
Waiting = tuple[State, int | None, frozenset[str]]
Pairs = dict[str, list[tuple[int, float]]]  # a table as OpenSpiel takes it
ProbsFn = Callable[[list[tuple[State, int]]], list[dict[int, float]]]


def _once(solve: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function of a game, keyed by the game's text, since games have no hash."""
    kept = lru_cache(maxsize=32)(lambda text, *more: solve(pyspiel.load_game(text), *more))
    return wraps(solve)(lambda game, *more: kept(str(game), *more))


class Known:
    """How an opponent plays whose every answer is known; not a plain table, since caches need it to have a hash."""

    def __init__(self, table: TabularPolicy) -> None:
        self.table = table


class InfoState(NamedTuple):
    """One information state: ``state`` is one of its histories, as it occurs in play, with ``seat`` to move.

    In a simultaneous game no seat has chosen yet in ``state``.
    """

    state: State
    seat: int
    key: str


class Position(NamedTuple):
    """A node of a perfect-information game; ``children`` are keys, ``chance`` their probabilities at a chance node."""

    state: State
    actions: list[int]
    children: list[str]
    chance: list[float]


def feasible(pyspiel_game: SpielGame) -> bool:
    """Return whether this module can treat a game in seconds: two-player, zero-sum and within the bounds above.

    Finding out takes at most a walk up to the bound (a second or two), once per process.
    """
    kind = pyspiel_game.get_type()
    listed = kind.chance_mode != pyspiel.GameType.ChanceMode.SAMPLED_STOCHASTIC
    described = _is_perfect(pyspiel_game) or kind.provides_information_state_string
    return is_duel(pyspiel_game) and listed and described and _is_small(str(pyspiel_game))


def is_duel(pyspiel_game: SpielGame) -> bool:
    """Return whether two play, and one wins what the other loses."""
    return pyspiel_game.num_players() == 2 and pyspiel_game.get_type().utility == pyspiel.GameType.Utility.ZERO_SUM


def information_states(pyspiel_game: SpielGame) -> list[InfoState]:
    """Return all states in which a seat moves, forced moves too, in a fixed order; ValueError: not ``feasible``."""
    if not feasible(pyspiel_game):
        raise ValueError(
            f"{pyspiel_game} has no exact values: allowed are two-player zero-sum games with at most "
            f"{MAX_HISTORIES} histories of {MAX_MOVES} moves (hidden information) or {MAX_POSITIONS} positions "
            "(perfect information; str(state) has to tell them apart)"
        )
    return _explore(str(pyspiel_game))


def info_key(state: State, seat: int) -> str:
    """Return the key of a table for the decision of ``seat`` in a state that occurs in play."""
    game = state.get_game()
    if _is_perfect(game):
        return _position_key(state)
    own = _information_state(state, seat)
    return f"Current player: {seat}\n{own}" if state.is_simultaneous_node() else own  # as in the turn-based game's text


def tabulate(pyspiel_game: SpielGame, probs_fn: ProbsFn) -> TabularPolicy:
    """Ask a policy about every information state but those with forced moves, in one call, and return its table.

    ValueError: the game is not ``feasible``, or an answer is not a distribution over the legal actions.
    """
    asked = [info for info in information_states(pyspiel_game) if len(info.state.legal_actions(info.seat)) > 1]
    answers = probs_fn([(info.state, info.seat) for info in asked])
    found = {info.key: _distribution(probs, info) for info, probs in zip(asked, answers, strict=True)}
    return uniform_table(pyspiel_game) | found  # in which forced moves are certain


def uniform_table(pyspiel_game: SpielGame) -> TabularPolicy:
    """Return the table of the uniform random player."""
    legal = {info.key: info.state.legal_actions(info.seat) for info in information_states(pyspiel_game)}
    return {key: dict.fromkeys(actions, 1 / len(actions)) for key, actions in legal.items()}


def value_against_random(pyspiel_game: SpielGame, table: TabularPolicy) -> tuple[float, float]:
    """Return a policy's expected return against uniform random, in seat 0 and in seat 1."""
    uniform = uniform_table(pyspiel_game)
    root = pyspiel.load_game_as_turn_based(str(pyspiel_game)).new_initial_state()
    first, second = _worth_to(pyspiel_game, 0, (table, uniform)), _worth_to(pyspiel_game, 1, (uniform, table))
    return first(root), second(root)


@_once
def best_response_values(pyspiel_game: SpielGame) -> tuple[float, float]:
    """Return the expected return of the best response to uniform random, per seat: the ceiling."""
    return _response(pyspiel_game, 0)[0], _response(pyspiel_game, 1)[0]


@_once
def _response(pyspiel_game: SpielGame, seat: int, opponent: Known | None = None) -> tuple[float, dict[str, int]]:
    """Return the expected return of a best response in ``seat``, and its answers; None: to uniform random."""
    return _best_response(pyspiel_game, seat, opponent.table if opponent else uniform_table(pyspiel_game))


def nash_conv(pyspiel_game: SpielGame, table: TabularPolicy) -> float:
    """Return what both seats together gain by best-responding to the table; 0 exactly at a Nash equilibrium.

    Lanctot et al. 2017, "A Unified Game-Theoretic Approach to Multiagent Reinforcement Learning".
    """
    information_states(pyspiel_game)
    # Nothing is taken off, since the values of the table itself sum to 0.
    return _best_response(pyspiel_game, 0, table)[0] + _best_response(pyspiel_game, 1, table)[0]


def answer_values(pyspiel_game: SpielGame, table: TabularPolicy) -> dict[str, dict[int, float]]:
    """Return what each answer in each information state is worth to its seat, in the game's own units.

    That is the seat's mean return if it gives this answer there and all seats play the table otherwise: its
    counterfactual value (Zinkevich et al. 2007, "Regret Minimization in Games with Incomplete Information", section 3)
    over the odds that chance and the others come there. 0 where they never do.
    """
    values: dict[str, dict[int, float]] = {info.key: {} for info in information_states(pyspiel_game)}
    if _is_perfect(pyspiel_game):
        worth = _worth(str(pyspiel_game), (table, table))
        for key, node in _positions(str(pyspiel_game)).items():
            if key in values:
                sign = (1, -1)[node.state.current_player()]
                values[key] = {
                    a: float(sign * worth[child]) for a, child in zip(node.actions, node.children, strict=True)
                }
        return values
    tree = _histories(pyspiel_game)
    odds_N = np.array([table[key][action] for key, action in tree.answers] + [0.0])[tree.answer_N]
    odds_N = np.where(tree.answer_N < 0, tree.chance_N, odds_N)
    others_SN, worth_N = np.ones((2, len(odds_N))), tree.returns_N.copy()  # odds of all moves so far but the seat's own
    for level in tree.levels:
        for seat, others_N in enumerate(others_SN):
            own = tree.seat_N[level] == seat
            others_N[level] = others_N[tree.parent_N[level]] * np.where(own, 1.0, odds_N[level])
    for level in reversed(tree.levels):
        worth_N += np.bincount(tree.parent_N[level], odds_N[level] * worth_N[level], len(worth_N))
    given = np.nonzero(tree.answer_N >= 0)[0]
    answer_E, seat_E = tree.answer_N[given], tree.seat_N[given]
    weight_E, sign_E = others_SN[seat_E, tree.parent_N[given]], np.where(seat_E == 0, 1.0, -1.0)
    sums, weights = np.bincount(answer_E, weight_E * sign_E * worth_N[given]), np.bincount(answer_E, weight_E)
    for (key, action), total, count in zip(tree.answers, sums.tolist(), weights.tolist(), strict=True):
        values[key][action] = total / count if count else 0.0
    return values


class Histories(NamedTuple):
    """The N histories of a game that hides something, the root first; what is said of each is of the move before it."""

    levels: list[slice]  # of histories of equal length, the root's not
    parent_N: Any
    seat_N: Any  # -1: chance
    answer_N: Any  # index into ``answers``; -1: chance
    chance_N: Any  # its odds; 0: a seat's
    returns_N: Any  # of seat 0, where the game has ended
    answers: list[tuple[str, int]]  # (key of the information state, action)


@_once
def _histories(pyspiel_game: SpielGame) -> Histories:
    start = pyspiel.load_game_as_turn_based(str(pyspiel_game)).new_initial_state()
    level, levels, rows = [start], list[slice](), [(0, -1, -1, 0.0, start.returns()[0] if start.is_terminal() else 0.0)]
    numbers: dict[tuple[str, int], int] = {}
    first = 0
    while level:
        below = list[State]()
        for parent, state in enumerate(level, first):
            seat, moves = state.current_player(), [(a, 0.0) for a in state.legal_actions()]
            key = "" if seat < 0 else _information_state(state, seat)
            for action, odds in state.chance_outcomes() if state.is_chance_node() else moves:
                child = state.child(action)
                number = -1 if seat < 0 else numbers.setdefault((key, action), len(numbers))
                rows.append((parent, seat, number, odds, child.returns()[0] if child.is_terminal() else 0.0))
                below.append(child)
        first += len(level)
        levels.append(slice(first, first + len(below)))
        level = below
    parent_N, seat_N, answer_N, chance_N, returns_N = (np.array(column) for column in zip(*rows, strict=True))
    return Histories(levels[:-1], parent_N, seat_N, answer_N, chance_N, returns_N, list(numbers))


def luck(
    game: SpielGame, history: Sequence[Sequence[int]], seat: int, opponent: Known | None = None
) -> tuple[list[float], list[float]] | None:
    """Return by how much each move of chance and the opponent (None: random) favoured ``seat``, and what it could get.

    ``history``: [[player, action], ...], -1 for chance. What a seat stands to get, before each move and at the end, is
    the mean return, in the game's own units, of a player that is half random and half a best response, from there on
    with all that is hidden. A move of others favours it by the difference that it makes to that, one of its own by 0.
    In the mean that is 0, whoever plays: a return less its luck has the same mean, and the less variance the more the
    player is like this one (AIVAT without the terms of the player's own moves: https://arxiv.org/abs/1612.06915).

    None: the seats choose at once, or the game is not ``feasible``.
    """
    if game.get_type().dynamics != pyspiel.GameType.Dynamics.SEQUENTIAL or not feasible(game):
        return None
    look, actions = _look(game, seat, opponent), tuple(action for _, action in history)
    looks = [look(actions[:before]) for before in range(len(actions) + 1)]
    favours = [changes.get(action, 0.0) for (_, changes), action in zip(looks, actions, strict=False)]
    return favours, [worth for worth, _ in looks]


@_once
def _look(
    pyspiel_game: SpielGame, seat: int, opponent: Known | None
) -> Callable[[tuple[int, ...]], tuple[float, dict[int, float]]]:
    """Return a function of the actions so far: the position's worth to ``seat``, and how others' moves change it."""
    worth_of = _half_best(pyspiel_game, seat, opponent)

    @lru_cache(maxsize=2**12)
    def look(actions: tuple[int, ...]) -> tuple[float, dict[int, float]]:
        state = pyspiel_game.new_initial_state()
        for action in actions:
            state.apply_action(action)
        worth, legal = worth_of(state), state.legal_actions()
        others = [] if state.current_player() == seat else legal
        return worth, {action: worth_of(state.child(action)) - worth for action in others}

    return look


def _half_best(pyspiel_game: SpielGame, seat: int, opponent: Known | None) -> Callable[[State], float]:
    """Return what positions are worth to ``seat`` against the opponent, if it is half a best response to that."""
    table, (_, best) = uniform_table(pyspiel_game), _response(pyspiel_game, seat, opponent)
    mine = {key: {a: p / 2 + (best.get(key) == a) / 2 for a, p in probs.items()} for key, probs in table.items()}
    tables = [mine if i == seat else opponent.table if opponent else table for i in (0, 1)]
    return _worth_to(pyspiel_game, seat, tables)


@_once
def perfect_table(pyspiel_game: SpielGame) -> TabularPolicy:
    """Return perfect play where nothing is hidden: uniform over the moves that keep the position's value.

    ValueError if something is hidden, or the game is not ``feasible``.
    """
    if not _is_perfect(pyspiel_game):
        raise ValueError("it hides information or has simultaneous moves; use cfr")
    information_states(pyspiel_game)
    values, table = _worth(str(pyspiel_game), (None, None)), TabularPolicy()
    for key, node in _positions(str(pyspiel_game)).items():
        if node.children and not node.chance:
            keeps = [abs(values[child] - values[key]) < 1e-9 for child in node.children]
            table[key] = {action: kept / sum(keeps) for action, kept in zip(node.actions, keeps, strict=True)}
    return table


@_once
def equilibrium_table(pyspiel_game: SpielGame, iterations: int) -> TabularPolicy:
    """Return the average policy of CFR+ (https://arxiv.org/abs/1407.5042), near an equilibrium of a game that hides.

    ValueError if nothing is hidden, or the game is not ``feasible``.
    """
    if _is_perfect(pyspiel_game):
        raise ValueError("it hides nothing; use perfect")
    infos = information_states(pyspiel_game)
    solver = pyspiel.CFRPlusSolver(pyspiel.load_game_as_turn_based(str(pyspiel_game)))
    for _ in range(iterations):
        solver.evaluate_and_update_policy()
    average = solver.average_policy()
    return {info.key: _distribution(average.action_probabilities(info.key), info) for info in infos}


def _is_perfect(pyspiel_game: SpielGame) -> bool:
    kind = pyspiel_game.get_type()
    in_turn = kind.dynamics == pyspiel.GameType.Dynamics.SEQUENTIAL
    return in_turn and kind.information == pyspiel.GameType.Information.PERFECT_INFORMATION


def _distribution(probs: dict[int, float], info: InfoState) -> dict[int, float]:
    """Return probabilities over all legal actions that sum to one in double precision, whatever the input's was."""
    legal = info.state.legal_actions(info.seat)
    total = float(sum(probs.values()))
    if not set(probs) <= set(legal) or min(probs.values(), default=0) < 0 or not abs(total - 1) < 1e-3:
        raise ValueError(f"probabilities {probs} at {info.key!r} are not a distribution over the legal actions {legal}")
    return {action: float(probs.get(action, 0)) / total for action in legal}


@cache  # of more games than information states are kept of: a step may play any of them, and asks of each episode
def _is_small(game_string: str) -> bool:
    return bool(_explore(game_string))


@lru_cache(maxsize=32)
def _explore(game_string: str) -> list[InfoState]:
    """Return a game's information states; none if it is too large or (which is logged) raises in a position."""
    try:
        return _walk(game_string)
    except Exception as error:  # a user's game may raise anything, or its text may not load as the game
        message = (str(error).splitlines() or [""])[0]
        logger.warning("%s has no exact values: %s: %s", game_string, type(error).__name__, message)
        return []


def _walk(game_string: str) -> list[InfoState]:
    pyspiel_game = pyspiel.load_game(game_string)
    if _is_perfect(pyspiel_game):
        nodes = _positions(game_string).items()
        return [InfoState(p.state, p.state.current_player(), key) for key, p in nodes if p.state.is_player_node()]
    turn_based = pyspiel.load_game_as_turn_based(game_string)  # seats that choose at once choose in turn, unseen
    simultaneous = pyspiel_game.get_type().dynamics == pyspiel.GameType.Dynamics.SIMULTANEOUS
    found: dict[str, InfoState] = {}
    legal_at: dict[str, list[int]] = {}
    # No table holds an answer for both seats, or for two decisions of a seat in one game.
    shared, again = set[str](), set[str]()
    # Moves wait, not the positions after them: those of a long game would fill the memory. With the keys before them.
    stack, histories = list[Waiting]([(turn_based.new_initial_state(), None, frozenset())]), 0
    while stack:
        before, action, keys = stack.pop()
        state = before if action is None else before.child(action)
        if state.is_terminal():
            continue
        histories += 1
        if histories > MAX_HISTORIES or state.move_number() > MAX_MOVES:
            return []
        legal = state.legal_actions()
        if (seat := state.current_player()) >= 0:
            key = _information_state(state, seat)
            if key not in found:
                found[key] = InfoState(state.simultaneous_game_state().clone() if simultaneous else state, seat, key)
            elif found[key].seat != seat:
                shared.add(key)
            if key in keys or legal_at.setdefault(key, legal) != legal:
                again.add(key)
            keys |= {key}
        stack.extend((state, action, keys) for action in reversed(legal))
    if shared:
        raise ValueError(f"both seats have the information state {min(shared)!r}")
    if again:
        raise ValueError(f"a seat has the information state {min(again)!r} at two decisions of a game")
    return list(found.values())


def _information_state(state: State, seat: int) -> str:
    """The text that OpenSpiel's algorithms read: of a Python game its observer's, not that of a method of its state."""
    return pyspiel.State.information_state_string(state, seat)


def _position_key(state: State) -> str:
    return f"{state.current_player()} {state}"


def _outlook(state: State) -> tuple[list[int], float]:
    """Return what positions of equal text must have in common: legal actions, and seat 0's return so far."""
    return state.legal_actions(), round(state.returns()[0], 9)


@lru_cache(maxsize=32)
def _positions(game_string: str) -> dict[str, Position]:
    """Return the positions of a perfect-information game, children before parents, the initial one last.

    {} if there are too many, if one can recur, or if two of equal text differ in their ``_outlook``.
    """
    root = pyspiel.load_game(game_string).new_initial_state()
    found, nodes = {_position_key(root): _outlook(root)}, {}
    queue = deque([root])  # breadth first: a long game's deep states are slow to copy
    while queue:
        state, children = queue.popleft(), []
        actions = state.legal_actions()
        for child in map(state.child, actions):
            children.append(_position_key(child))
            if children[-1] not in found:
                found[children[-1]] = _outlook(child)
                queue.append(child)
            elif found[children[-1]] != _outlook(child):
                return {}
        if len(found) > MAX_POSITIONS:
            return {}
        chance = [p for _, p in state.chance_outcomes()] if state.is_chance_node() else []
        nodes[_position_key(state)] = Position(state, actions, children, chance)
    order = TopologicalSorter({key: node.children for key, node in nodes.items()}).static_order()
    try:
        return {key: nodes[key] for key in order}
    except CycleError:
        return {}


def _worth(game_string: str, tables: Sequence[TabularPolicy | None]) -> dict[str, float]:
    """Return each position's value for seat 0 when seat ``i`` plays ``tables[i]`` (None: the best it can)."""
    values: dict[str, float] = {}
    for key, node in _positions(game_string).items():
        below, seat = [values[child] for child in node.children], node.state.current_player()
        if not below:
            values[key] = node.state.returns()[0]
        elif not node.chance and (table := tables[seat]) is None:
            values[key] = (max, min)[seat](below)
        else:
            weights = node.chance or [table[key][action] for action in node.actions]
            values[key] = sum(w * v for w, v in zip(weights, below, strict=True))
    return values


def _worth_to(pyspiel_game: SpielGame, seat: int, tables: Sequence[TabularPolicy]) -> Callable[[State], float]:
    """Return what positions are worth to ``seat`` when seat ``i`` plays ``tables[i]``."""
    if _is_perfect(pyspiel_game):
        values = _worth(str(pyspiel_game), tables)
        return lambda state: (1, -1)[seat] * values[_position_key(state)]
    policies = [pyspiel.TabularPolicy(_pairs(table)) for table in tables]
    return lambda state: pyspiel.expected_returns(state, policies, -1, True)[seat]


def _best_response(pyspiel_game: SpielGame, seat: int, table: TabularPolicy) -> tuple[float, dict[str, int]]:
    """Return the expected return of a best response in ``seat`` to the other seat's table, and its answers.

    OpenSpiel's takes 0.4 GB of liars_dice_small, which the process would keep for its lifetime.
    """
    text = str(pyspiel_game)
    if _is_perfect(pyspiel_game):
        worth, pick = _worth(text, [None if i == seat else table for i in (0, 1)]), (max, min)[seat]
        nodes = [(key, p) for key, p in _positions(text).items() if p.state.current_player() == seat]
        answers = {k: pick((worth[c], a) for a, c in zip(p.actions, p.children, strict=True))[1] for k, p in nodes}
        return (1, -1)[seat] * [*worth.values()][-1], answers
    game = pyspiel.load_game_as_turn_based(text)
    response = pyspiel.TabularBestResponse(game, seat, _pairs(table))  # a policy object would dangle
    found = response.value_from_state(game.new_initial_state()), response.get_best_response_actions()
    del response
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
        trim(0)
    return found


def _pairs(table: TabularPolicy) -> Pairs:
    return {key: list(probs.items()) for key, probs in table.items()}
