"""Scripted and random play of the games from go to oware, for their tests."""

from __future__ import annotations

import random
from importlib import import_module
from itertools import pairwise

import pyspiel

MODULES = (
    "go", "chess", "checkers", "quoridor", "blackjack", "phantom_ttt", "game_2048", "solitaire", "bridge", "amazons",
    "oware",
)  # fmt: skip
GAMES = {module: import_module(f"games.{module}").GAME for module in MODULES}
VARIANTS = [
    (module, c)
    for module, game in GAMES.items()
    for c in range(4)
    if all(game.params(c) != game.params(earlier) for earlier in range(c))
]


def start(module, c=0):
    """The initial state after the deal of the game's variant c."""
    game = GAMES[module]
    return deal(pyspiel.load_game(game.short_name, game.params(c)).new_initial_state(), random.Random(0))


def deal(state, rng):
    while state.is_chance_node():
        state.apply_action(rng.choice(state.legal_actions()))
    return state


def decisions(module, c, seed, cap=10**6):
    """The first ``cap`` decision states of a uniformly random game, then its last state."""
    rng, game = random.Random(seed), GAMES[module]
    state = deal(pyspiel.load_game(game.short_name, game.params(c)).new_initial_state(), rng)
    while not state.is_terminal() and cap > 0:
        yield state
        state.apply_action(rng.choice(state.legal_actions()))
        deal(state, rng)
        cap -= 1
    yield state


def names(state):
    player = state.current_player()
    return {state.action_to_string(player, action): action for action in state.legal_actions()}


def steps(module, c, seed):
    """(state before, player, action, state after) of each decision of a uniformly random game without chance."""
    for before, after in pairwise([state.clone() for state in decisions(module, c, seed)]):
        yield before, before.current_player(), after.history()[-1], after


def play(state, moves):
    for move in moves:
        state.apply_action(names(state)[move])
    return state


def rules(module, c=0):
    return GAMES[module].rules(GAMES[module].params(c))


def final(module, c, seed):
    for state in decisions(module, c, seed):
        last = state
    return last
