"""Helpers of the tests that hold games/ against the engine."""

import random
import re
from itertools import pairwise

import pyspiel

from games import GAMES

BY_NAME = {game.name: game for game in GAMES}


def load(name, config_id=0):
    game = BY_NAME[name]
    return pyspiel.load_game(game.short_name, game.params(config_id))


def rules(name, config_id=0):
    game = BY_NAME[name]
    return game.rules(game.params(config_id))


def prompts(name, state, seat):
    game = BY_NAME[name]
    return game.describe(state, seat), game.compact(state, seat)


def acting(state):
    return list(range(state.num_players())) if state.is_simultaneous_node() else [state.current_player()]


def advance(state, rng, choose=None):
    """Play one random step in place: chance, all seats of a simultaneous move, or one player's move."""
    if state.is_chance_node():
        outcomes, weights = zip(*state.chance_outcomes(), strict=True)
        state.apply_action(rng.choices(outcomes, weights)[0])
    elif state.is_simultaneous_node():
        state.apply_actions([rng.choice(state.legal_actions(p)) for p in acting(state)])
    else:
        state.apply_action(choose(state) if choose else rng.choice(state.legal_actions()))


def playthrough(name, config_id=0, seed=0, choose=None):
    """Yield the live state before every decision, then the last one: terminal, or gin rummy's dead end."""
    rng = random.Random(seed)
    state = load(name, config_id).new_initial_state()
    while not state.is_terminal() and (state.is_simultaneous_node() or state.legal_actions()):
        if not state.is_chance_node():
            yield state
        advance(state, rng, choose)
    yield state


def deal(state, rng):
    """Let chance move until a player has to."""
    while state.is_chance_node():
        advance(state, rng)
    return state


def start(name, config_id=0):
    """The initial state after the deal."""
    return deal(load(name, config_id).new_initial_state(), random.Random(0))


def steps(name, config_id, seed):
    """(state before, player, action, state after) of each decision of a uniformly random game without chance."""
    for before, after in pairwise([state.clone() for state in playthrough(name, config_id, seed)]):
        yield before, before.current_player(), after.history()[-1], after


def names(state):
    """Name -> id of the legal actions."""
    return {state.action_to_string(state.current_player(), action): action for action in state.legal_actions()}


def play(state, moves):
    """Play moves by their names, in place."""
    for move in moves:
        state.apply_action(names(state)[move])
    return state


def from_history(game, actions):
    state = game.new_initial_state()
    for action in actions:
        state.apply_action(action)
    return state


def found(pattern, text):
    """Return the only group of the first match of a pattern that must be there."""
    return re.findall(pattern, text)[0]
