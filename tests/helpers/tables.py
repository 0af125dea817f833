"""Players as tables, for tests of what tables are worth."""

import numpy as np
import pyspiel

from envs import exact


def best_response_table(game):
    """A deterministic policy, for both seats, that attains ``exact.best_response_values``."""
    uniform, chosen = exact.uniform_table(game), dict[str, int]()
    for seat in (0, 1):
        chosen |= _by_position(game, seat) if exact._is_perfect(game) else _by_history(game, seat, uniform)
    return {key: {a: float(a == chosen.get(key, next(iter(p)))) for a in p} for key, p in uniform.items()}


def _by_position(game, seat):
    """What one seat plays against uniform random where nothing is hidden, and no dice are thrown."""
    values, chosen = dict[str, float](), dict[str, int]()
    for key, node in exact._positions(str(game)).items():
        below = [values[child] for child in node.children]
        if not below:
            values[key] = node.state.returns()[seat]
        elif node.state.current_player() == seat:
            values[key] = max(below)
            chosen[key] = node.actions[below.index(values[key])]
        else:
            values[key] = sum(below) / len(below)
    return chosen


def _by_history(game, seat, other):
    turn_based = pyspiel.load_game_as_turn_based(str(game))
    response = pyspiel.TabularBestResponse(turn_based, seat, exact._pairs(other))
    response.value_from_state(turn_based.new_initial_state())
    return response.get_best_response_actions()


def games_of(game, table, seat, opponent=None):
    """Probability, return and luck of ``seat`` in each game there can be, of a table against another or random play."""
    return np.array([row[:3] for row in all_games(game, table, seat, opponent)]).T


def all_games(game, table, seat, opponent=None):
    """As ``games_of``, game by game, and the history."""
    other = opponent.table if opponent else exact.uniform_table(game)

    def key(state):
        return exact.info_key(state, state.current_player())

    def walk(state, history, probability):
        if state.is_terminal():
            favours, _ = exact.luck(game, history, seat, opponent) or ([], [])
            yield probability, state.returns()[seat], sum(favours), history
            return
        player = state.current_player()
        probs = dict(state.chance_outcomes()) if player < 0 else (table, other)[player != seat][key(state)]
        for action, p in probs.items():
            yield from walk(state.child(action), [*history, [player, action]], probability * p)

    return walk(game.new_initial_state(), [], 1.0)
