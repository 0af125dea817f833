"""Exact values of a policy in small games: against uniform random, its ceiling, and NashConv. And who plays them best.

A policy is turned into a table once (one batched question about every information state); everything after
that is exact arithmetic, no sampling. Games with hidden information use OpenSpiel's C++ algorithms on the whole
history tree. Perfect-information games are solved on the graph of distinct positions instead, because their
OpenSpiel information state is the history and tic_tac_toe has 549,946 histories but only 5,478 positions.

Values are expected returns in the game's own units. They are exact for a policy that answers by information
state alone. What a seat has read and answered before follows from it where something is hidden; of a position that
many histories lead to, a policy whose prompt carries the conversation is represented by its answer without one.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import pyspiel

MAX_HISTORIES = 200_000  # decision and chance nodes of a game with hidden information (liars_dice with 1 die: 147,463)
MAX_POSITIONS = 20_000  # distinct positions of a perfect-information game, ends included (hex 3x3: 5,514)

logger = logging.getLogger(__name__)

State = Any  # pyspiel.State
SpielGame = Any  # pyspiel.Game
TabularPolicy = dict[str, dict[int, float]]  # information state key -> {legal action: probability}
ProbsFn = Callable[[list[tuple[State, int]]], list[dict[int, float]]]


def _once(solve: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of a game solve each once in a process: known by their texts, since games have no hash."""
    kept = lru_cache(maxsize=32)(lambda text, *more: solve(pyspiel.load_game(text), *more))
    return wraps(solve)(lambda game, *more: kept(str(game), *more))


class InfoState(NamedTuple):
    """One information state: ``state`` is some history in it, as the player sees it in play, ``seat`` to move.

    In a simultaneous game ``state`` is the simultaneous one, in which every seat is yet to choose.
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
    """Whether the functions of this module take seconds: two-player zero-sum and within the bounds above.

    Deciding costs at most a walk up to the bound (a second or two), once in a process.
    """
    kind = pyspiel_game.get_type()
    if pyspiel_game.num_players() != 2 or kind.utility != pyspiel.GameType.Utility.ZERO_SUM:
        return False
    if kind.chance_mode == pyspiel.GameType.ChanceMode.SAMPLED_STOCHASTIC:
        return False
    if not _is_perfect(pyspiel_game) and not kind.provides_information_state_string:
        return False
    return bool(_explore(str(pyspiel_game)))


def information_states(pyspiel_game: SpielGame) -> list[InfoState]:
    """Every information state in which a seat decides, in a fixed order, forced moves included.

    Raises:
        ValueError: the game is not ``feasible``.
    """
    if not feasible(pyspiel_game):
        raise ValueError(
            f"{pyspiel_game} is too large for exact values: allowed are two-player zero-sum games with at most "
            f"{MAX_HISTORIES} histories (hidden information) or {MAX_POSITIONS} positions (perfect "
            "information; str(state) has to tell them apart)"
        )
    return _explore(str(pyspiel_game))


def info_key(state: State, seat: int) -> str:
    """The key under which tables hold the decision of ``seat`` in a state met in play."""
    game = state.get_game()
    if _is_perfect(game):
        return _position_key(state)
    own = state.information_state_string(seat)
    return f"Current player: {seat}\n{own}" if state.is_simultaneous_node() else own  # as the turn-based game writes it


def tabulate(pyspiel_game: SpielGame, probs_fn: ProbsFn) -> TabularPolicy:
    """Ask a policy about every information state, in one call, forced moves aside.

    Raises:
        ValueError: the game is not ``feasible``, or an answer is not a distribution over the legal actions.
    """
    table: TabularPolicy = {}
    asked = []
    for info in information_states(pyspiel_game):
        legal = info.state.legal_actions(info.seat)
        if len(legal) == 1:
            table[info.key] = {legal[0]: 1.0}
        else:
            asked.append(info)
    answers = probs_fn([(info.state, info.seat) for info in asked])
    for info, probs in zip(asked, answers, strict=True):
        table[info.key] = _distribution(probs, info)
    return table


def uniform_table(pyspiel_game: SpielGame) -> TabularPolicy:
    """The table of the uniform random player."""
    return {info.key: _uniform(info.state.legal_actions(info.seat)) for info in information_states(pyspiel_game)}


def value_against_random(pyspiel_game: SpielGame, table: TabularPolicy) -> tuple[float, float]:
    """Expected return of the tabular policy against a uniform random opponent, sitting in seat 0 and in seat 1."""
    uniform = uniform_table(pyspiel_game)
    return (_values(pyspiel_game, [table, uniform])[0], _values(pyspiel_game, [uniform, table])[1])


@_once
def best_response_values(pyspiel_game: SpielGame) -> tuple[float, float]:
    """Expected return, per seat, of the best player there is against uniform random: the ceiling."""
    uniform = uniform_table(pyspiel_game)
    return _best_response(pyspiel_game, 0, uniform), _best_response(pyspiel_game, 1, uniform)


def nash_conv(pyspiel_game: SpielGame, table: TabularPolicy) -> float:
    """What both seats together gain by best-responding to the table; 0 exactly at a Nash equilibrium.

    Lanctot et al. 2017, "A Unified Game-Theoretic Approach to Multiagent Reinforcement Learning", section 3.2.
    """
    information_states(pyspiel_game)
    if _is_perfect(pyspiel_game):
        return sum(_best_response(pyspiel_game, seat, table) for seat in (0, 1))  # without it they have 0 together
    return pyspiel.nash_conv(_turn_based(pyspiel_game), _pairs(table))


@_once
def perfect_table(pyspiel_game: SpielGame) -> TabularPolicy:
    """Perfect play where nothing is hidden: of the moves that keep what can be had, each equally often.

    Raises:
        ValueError: something is hidden, or the game is not ``feasible``.
    """
    if not _is_perfect(pyspiel_game):
        raise ValueError("it hides information or has simultaneous moves: cfr can")
    information_states(pyspiel_game)
    values, table = _worth(str(pyspiel_game), (None, None)), TabularPolicy()
    for key, node in _positions(str(pyspiel_game)).items():
        if node.children and not node.chance:
            keeps = [abs(values[child] - values[key]) < 1e-9 for child in node.children]
            table[key] = {action: kept / sum(keeps) for action, kept in zip(node.actions, keeps, strict=True)}
    return table


@_once
def equilibrium_table(pyspiel_game: SpielGame, iterations: int) -> TabularPolicy:
    """The average policy of CFR+ (https://arxiv.org/abs/1407.5042): near an equilibrium where something is hidden.

    Raises:
        ValueError: nothing is hidden, or the game is not ``feasible``.
    """
    if _is_perfect(pyspiel_game):
        raise ValueError("it hides nothing: perfect can")
    infos = information_states(pyspiel_game)
    solver = pyspiel.CFRPlusSolver(_turn_based(pyspiel_game))
    for _ in range(iterations):
        solver.evaluate_and_update_policy()
    average = solver.average_policy()
    return {info.key: _distribution(average.action_probabilities(info.key), info) for info in infos}


def _is_perfect(pyspiel_game: SpielGame) -> bool:
    kind = pyspiel_game.get_type()
    return (
        kind.information == pyspiel.GameType.Information.PERFECT_INFORMATION
        and kind.dynamics == pyspiel.GameType.Dynamics.SEQUENTIAL
    )


def _turn_based(pyspiel_game: SpielGame) -> SpielGame:
    """The game itself, or the equivalent one in which seats choose one after the other, unseen."""
    if pyspiel_game.get_type().dynamics == pyspiel.GameType.Dynamics.SIMULTANEOUS:
        return pyspiel.convert_to_turn_based(pyspiel_game)
    return pyspiel_game


def _uniform(actions: list[int]) -> dict[int, float]:
    return {action: 1 / len(actions) for action in actions}


def _distribution(probs: dict[int, float], info: InfoState) -> dict[int, float]:
    """Probabilities over all legal actions, summing to one in double precision whatever precision they came in."""
    legal = info.state.legal_actions(info.seat)
    total = float(sum(probs.values()))
    if not set(probs) <= set(legal) or min(probs.values(), default=0) < 0 or not abs(total - 1) < 1e-3:
        raise ValueError(f"probabilities {probs} at {info.key!r} are no distribution over the legal actions {legal}")
    return {action: float(probs.get(action, 0)) / total for action in legal}


@lru_cache(maxsize=32)
def _explore(game_string: str) -> list[InfoState]:
    """The information states of a game; empty when it is beyond its bound or, as is logged, fails in a position."""
    try:
        return _walk(game_string)
    except Exception as error:  # of a game somebody wrote; or its text does not load as the game
        told = (str(error).splitlines() or [""])[0]
        logger.warning("%s has no exact values: %s: %s", game_string, type(error).__name__, told)
        return []


def _walk(game_string: str) -> list[InfoState]:
    pyspiel_game = pyspiel.load_game(game_string)
    if _is_perfect(pyspiel_game):
        nodes = _positions(game_string).items()
        return [InfoState(p.state, p.state.current_player(), key) for key, p in nodes if p.state.is_player_node()]
    turn_based = _turn_based(pyspiel_game)
    simultaneous = turn_based is not pyspiel_game
    found: dict[str, InfoState] = {}
    stack, histories = [turn_based.new_initial_state()], 0
    while stack:
        state = stack.pop()
        if state.is_terminal():
            continue
        histories += 1
        if histories > MAX_HISTORIES:
            return []
        seat = state.current_player()
        if seat >= 0 and (key := state.information_state_string(seat)) not in found:
            shown = state.simultaneous_game_state().clone() if simultaneous else state
            found[key] = InfoState(shown, seat, key)
        stack.extend(state.child(action) for action in reversed(state.legal_actions()))
    return list(found.values())


def _position_key(state: State) -> str:
    return f"{state.current_player()} {state}"


def _outlook(state: State) -> tuple[list[int], float]:
    return state.legal_actions(), round(state.returns()[0], 9) if state.is_terminal() else 0.0


@lru_cache(maxsize=32)
def _positions(game_string: str) -> dict[str, Position]:
    """The positions of a perfect-information game, children before parents, the initial one last; {}: too many, or
    they can come again, or their texts are not all that counts: two of one text go on or end in different ways."""
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
    """What positions are worth to seat 0 when seat ``i`` plays ``tables[i]``, None: as well as it can."""
    values: dict[str, float] = {}
    for key, node in _positions(game_string).items():
        below, seat = [values[child] for child in node.children], node.state.current_player()
        if not below:
            values[key] = node.state.returns()[0]
        elif node.chance:
            values[key] = _dot(node.chance, below)
        elif (table := tables[seat]) is None:
            values[key] = (max, min)[seat](below)
        else:
            values[key] = _dot([table[key][action] for action in node.actions], below)
    return values


def _values(pyspiel_game: SpielGame, tables: list[TabularPolicy]) -> tuple[float, float]:
    """Expected return of each seat when seat ``i`` plays ``tables[i]``."""
    if not _is_perfect(pyspiel_game):
        root = _turn_based(pyspiel_game).new_initial_state()
        v0, v1 = pyspiel.expected_returns(root, [pyspiel.TabularPolicy(_pairs(table)) for table in tables], -1, True)
        return v0, v1
    *_, value = _worth(str(pyspiel_game), tables).values()
    return value, -value


def _dot(weights: list[float], values: list[float]) -> float:
    return sum(w * v for w, v in zip(weights, values, strict=True))


def _best_response(pyspiel_game: SpielGame, seat: int, other: TabularPolicy) -> float:
    """Value of the best response of ``seat`` to ``other``."""
    if not _is_perfect(pyspiel_game):
        game = _turn_based(pyspiel_game)
        response = pyspiel.TabularBestResponse(game, seat, _pairs(other))  # it would not keep a policy alive
        return response.value_from_state(game.new_initial_state())
    *_, value = _worth(str(pyspiel_game), (None, other) if seat == 0 else (other, None)).values()
    return value if seat == 0 else -value


def _pairs(table: TabularPolicy) -> dict[str, list[tuple[int, float]]]:
    """The form OpenSpiel takes a table in."""
    return {key: list(probs.items()) for key, probs in table.items()}
