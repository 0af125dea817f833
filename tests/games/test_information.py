"""What prompts tell: nothing that is hidden from the player, and in the small games all that is not.

Solitaire is not among the games here: its engine draws a card only when it is turned up, so that two states never
differ in face-down cards alone.
"""

import random
import re

import pytest
from games_support import acting, from_history, load, playthrough
from test_prompts import swapped, unseen_pairs

import games
from envs import openspiel
from envs.openspiel import table
from envs.prompts import user_message

PAIRS = 200


def rendered(name, config_id, state, seat):
    """Both styles of the whole prompt of a decision, without past turns."""
    shared = table(games.NAMES.index(name) * games.CONFIGS_PER_GAME + config_id)
    legal = {action: state.action_to_string(seat, action) for action in state.legal_actions(seat)}
    return [
        shared.systems[prompt] + "\n\n" + user_message(shared.game, state, seat, legal, prompt)
        for prompt in ("full", "compact")
    ]


def by_information_state(name, config_id):
    """Pairs of positions, met in random games, that the engine says the seat to move cannot tell apart."""
    met: dict = {}
    for seed in range(10_000):
        for state in playthrough(name, config_id, seed):
            for seat in [] if state.is_terminal() else acting(state):
                known = (seat, state.information_state_string(seat))
                first = met.setdefault(known, state.clone())
                if first.history() != state.history():
                    yield seat, first, state


def by_another_deal(name, config_id, unseen):
    """Pairs of a position and the same with two unseen cards of others exchanged."""
    game = load(name, config_id)
    for seed in range(10_000):
        rng = random.Random(seed)
        for state in playthrough(name, config_id, seed):
            if state.is_terminal() or (seat := state.current_player()) < 0 or not state.legal_actions():
                break
            pairs = list(unseen(state, seat))
            twin = swapped(state, game, *rng.choice(pairs)) if pairs and rng.random() < 0.3 else None
            if twin is not None and twin.current_player() == seat and str(twin) != str(state):
                yield seat, state, twin


def unseen_in_bridge(state, seat):
    """Pairs of cards in two hands that the seat has not seen: not its own, not played, not on the table as dummy."""
    dummy = re.search(r"Dummy is (\w)", state.observation_string(seat))
    visible = {seat} | ({"NESW".index(dummy[1])} if dummy else set())
    dealt = [item.action for item in state.full_history()[:52]]
    played = {item.action for item in state.full_history()[52:]}
    hidden = [(i % 4, card) for i, card in enumerate(dealt) if i % 4 not in visible and card not in played]
    yield from ((a, b) for p, a in hidden for q, b in hidden if p < q)


def by_the_dealers_card(name, config_id):
    """Blackjack: the same hand against every other face-down card of the dealer."""
    for seed in range(10_000):
        for state in playthrough(name, config_id, seed):
            if state.is_terminal():
                break
            history = state.history()
            for card in random.Random(seed).sample(sorted(set(range(52)) - set(history)), 3):
                yield 0, state, from_history(state.get_game(), [*history[:2], card, *history[3:]])


def pairs_of(name, config_id):
    if name in ("hearts", "euchre", "gin_rummy"):
        return by_another_deal(name, config_id, lambda state, seat: unseen_pairs(name, state, seat))
    if name == "bridge":
        return by_another_deal(name, config_id, unseen_in_bridge)
    return by_the_dealers_card(name, config_id) if name == "blackjack" else by_information_state(name, config_id)


HIDING = [
    ("liars_dice", 0), ("leduc_poker", 0), ("gin_rummy", 4), ("hearts", 7), ("euchre", 3), ("blackjack", 0),
    ("phantom_ttt", 0), ("phantom_ttt", 1), ("bridge", 1), ("kuhn_poker", 0), ("liars_dice_small", 0),
    ("goofspiel_small", 0),
]  # fmt: skip


def test_every_game_that_hides_something_is_looked_at():
    hiding = {
        name for name in games.NAMES
        if str(load(name).get_type().information).endswith("IMPERFECT_INFORMATION")
    }  # fmt: skip
    assert hiding - {"solitaire"} == {name for name, _ in HIDING}


@pytest.mark.parametrize(("name", "config_id"), HIDING)
def test_positions_that_differ_in_what_is_hidden_have_the_same_prompts(name, config_id):
    checked = 0
    for seat, state, twin in pairs_of(name, config_id):
        assert str(state) != str(twin) or state.history() != twin.history()
        assert rendered(name, config_id, state, seat) == rendered(name, config_id, twin, seat)
        checked += 1
        if checked == PAIRS:
            break
    assert checked == PAIRS


@pytest.mark.parametrize("name", games.NAMES)
def test_the_compact_system_message_tells_the_variant(name):
    start = games.NAMES.index(name) * games.CONFIGS_PER_GAME
    variants = openspiel.tables([(start, start + openspiel.DISTINCT)])
    assert len({shared.systems["compact"] for shared in variants}) == len(variants)
    assert table(start).systems["compact"] == name
