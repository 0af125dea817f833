"""Go to oware: parameters, and prompts that tell all a player may know and nothing else."""

from __future__ import annotations

import re
from collections import defaultdict

import pyspiel
import pytest
from playing import GAMES, VARIANTS, decisions, rules, start


@pytest.mark.parametrize(("module", "c"), VARIANTS)
def test_every_decision_renders_short_and_both_styles_tell_the_same(module, c):
    game, cap = GAMES[module], 60 if module in ("chess", "quoridor", "solitaire") else 150
    for seed in range(2):
        styles = set()
        for state in decisions(module, c, seed, cap):
            seat = max(state.current_player(), 0)
            full, short = game.describe(state, seat), game.compact(state, seat)
            assert 0 < len(short) < len(full) < 8000
            styles.add((seat, full, short))
        assert len(styles) == len({row[:2] for row in styles}) == len({row[::2] for row in styles})


@pytest.mark.parametrize(("module", "c"), VARIANTS)
def test_rules_are_short_and_without_holes(module, c):
    text = rules(module, c)
    assert 200 < len(text) < 2500
    assert "{" not in text
    assert all(len(line) < 420 for line in text.splitlines())


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("go", ["go(board_size=5,komi=7.5)", "go(board_size=7,komi=7.5)", "go(board_size=5,komi=7.5)"]),
        ("quoridor", [f"quoridor(board_size={n},wall_count={w})" for n in (7, 9) for w in (8, 10)]),
        ("phantom_ttt", ["phantom_ttt(obstype=reveal-nothing)", "phantom_ttt(obstype=reveal-numturns)"]),
        ("amazons", [f"amazons(board_size={n})" for n in (6, 8, 10, 6)]),
        ("oware", [f"oware(num_seeds_per_house={n})" for n in (4, 3, 5, 4)]),
        (
            "bridge",
            ["bridge()", "bridge(use_double_dummy_result=False)", "bridge(dealer_vul=True,non_dealer_vul=True)"],
        ),
        ("game_2048", ["2048()"]),
    ],
)
def test_parameters_load_the_intended_game(module, expected):
    game = GAMES[module]
    assert [str(pyspiel.load_game(game.short_name, game.params(c))) for c in range(len(expected))] == expected


# --- hidden information ---


@pytest.mark.parametrize(
    ("module", "c", "games"), [("phantom_ttt", 0, 300), ("phantom_ttt", 1, 300), ("blackjack", 0, 300)]
)
def test_prompt_and_information_state_determine_each_other(module, c, games):
    texts, infos, worlds = defaultdict(set), defaultdict(set), defaultdict(set)
    for seed in range(games):
        for state in decisions(module, c, seed):
            if (seat := state.current_player()) < 0:
                continue
            info = (seat, state.information_state_string(seat))
            for text in (GAMES[module].describe(state, seat), GAMES[module].compact(state, seat)):
                texts[info].add(text)
                infos[seat, text].add(info)
            worlds[info].add(str(state))
    assert max(map(len, texts.values())) == 2
    assert max(map(len, infos.values())) == 1
    assert module == "blackjack" or max(map(len, worlds.values())) > 3


def test_blackjack_hides_the_dealers_first_card():
    state = start("blackjack")
    hidden = state.history()[2]
    for other in set(range(52)) - set(state.history()):
        twin = state.get_game().new_initial_state()
        for action in [*state.history()[:2], other, state.history()[3]]:
            twin.apply_action(action)
        assert str(twin) != str(state)
        for render in (GAMES["blackjack"].describe, GAMES["blackjack"].compact):
            assert render(twin, 0) == render(state, 0)
    card = "CDHS"[hidden // 13] + "A23456789TJQK"[hidden % 13]
    assert card in str(state)
    assert card not in GAMES["blackjack"].describe(state, 0)


def test_bridge_shows_nothing_of_the_other_hands():
    differing = 0
    for state in decisions("bridge", 1, seed=3):
        if state.is_terminal():
            break
        seat = state.current_player()
        twin = state.resample_from_infostate(seat, pyspiel.UniformProbabilitySampler(0.0, 1.0))
        differing += str(twin) != str(state)
        for render in (GAMES["bridge"].describe, GAMES["bridge"].compact):
            assert render(twin, seat) == render(state, seat)
    assert differing > 30


def test_solitaire_shows_only_cards_turned_up():
    for state in decisions("solitaire", 0, seed=1, cap=60):
        revealed = {a for a in state.history() if 1 <= a <= 52}
        known = {"A23456789TJQK"[(a - 1) % 13] + "♠♥♣♦"[(a - 1) // 13] for a in revealed}
        text = GAMES["solitaire"].describe(state, 0)
        shown = set(re.findall(r"[A2-9TJQK][♠♥♣♦]", text))
        tops = set(re.findall(r"[A2-9TJQK][♠♥♣♦]", text.splitlines()[1]))
        assert shown <= known
        assert text.count("##") - 1 == 52 - len(revealed)
        below = sum("A23456789TJQK".index(top[0]) for top in tops)
        assert len(shown) + below == len(known)
