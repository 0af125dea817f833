"""Go to oware: every claim of the rules text held against the engine."""

from __future__ import annotations

import random
import re
from importlib import import_module

import pyspiel
import pytest
from games_support import BY_NAME as GAMES
from games_support import deal, names, play, playthrough, rules, start, steps


@pytest.mark.parametrize("c", [0, 1])
def test_go_size_komi_ids_and_ends(c):
    size, state = 5 + 2 * c, start("go", c)
    assert f"{size}x{size}" in rules("go", c)
    assert f"after {state.get_game().max_game_length()} turns" in rules("go", c)
    assert names(state)["B a1"] == 0
    assert names(state)["B b1"] == 1
    play(state, ["B a1"])
    assert GAMES["go"].compact(state, 1).startswith("o" + "." * (size - 1) + "/")
    play(state, ["W PASS"])
    assert "another pass ends" in GAMES["go"].describe(state, 0)
    play(state, ["B PASS"])
    assert state.returns() == [1.0, -1.0]  # one stone owns the whole board: more than 7.5
    assert play(start("go", c), ["B PASS", "W PASS"]).returns() == [-1.0, 1.0]  # komi decides an empty board


def test_go_a_repeated_board_ends_in_a_draw():
    draws = 0
    for seed in range(120):
        rng, state, boards = random.Random(seed), start("go"), []
        while not state.is_terminal():
            boards.append(str(state).split("\n", 1)[1])
            state.apply_action(rng.choice(state.legal_actions()[:-1] or state.legal_actions()))
        if len(state.history()) < 50:
            assert str(state).split("\n", 1)[1] in boards
            assert state.returns() == [0.0, 0.0]
            draws += 1
    assert draws


def test_chess_colours_and_draws():
    game = pyspiel.load_game("chess")
    state = game.new_initial_state()
    assert state.current_player() == 1
    assert GAMES["chess"].describe(state, 1).startswith("You are White.\n8 r n b q k b n r")
    play(state, ["Nf3", "Nf6", "Ng1", "Ng8"] * 2)
    assert state.is_terminal()
    assert state.returns() == [0.0, 0.0]
    late = game.new_initial_state("4k3/8/8/8/8/8/4P3/4K3 w - - 99 80")
    assert not late.is_terminal()
    assert play(late, ["Kd1"]).is_terminal()
    for drawn in ("7k/5Q2/6K1/8/8/8/8/8 b - - 0 1", "8/8/8/4k3/8/8/4KN2/8 w - - 0 1"):
        assert game.new_initial_state(drawn).is_terminal()
        assert game.new_initial_state(drawn).returns() == [0.0, 0.0]
    assert {"O-O", "O-O-O", "Rxa8+"} <= set(names(game.new_initial_state("r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1")))
    promotions = names(game.new_initial_state("8/P6k/8/8/8/8/8/K7 w - - 0 1"))
    assert {"a8=Q", "a8=R", "a8=B", "a8=N"} <= set(promotions)


def test_checkers_moves_captures_crowning_and_draw():
    assert set(names(start("checkers"))) >= {"a3b4", "g3h4"}
    seen = dict.fromkeys(("continued", "crowned", "draws"), 0)
    for seed in range(20):
        quiet = 0
        for before, player, action, after in steps("checkers", 0, seed):
            moves = names(before)
            jumps = {name for name in moves if abs(ord(name[0]) - ord(name[2])) == 2}
            assert not jumps or len(jumps) == len(moves)
            move = before.action_to_string(player, action)
            quiet = 0 if move in jumps else quiet + 1
            again = after.current_player() == player
            piece = str(before).splitlines()[8 - int(move[1])][1 + "abcdefgh".index(move[0])]
            crowned = piece in "o+" and move[3] == "81"[player]
            assert not (again and (crowned or move not in jumps))
            assert not again or all(name.startswith(move[2:]) for name in names(after))
            assert again == (f"Your piece on {move[2:]} must" in GAMES["checkers"].describe(after, player))
            assert f"capture: {quiet} of 40" in GAMES["checkers"].describe(after, player)
            assert "o8+*".index(str(after).splitlines()[8 - int(move[3])][1 + "abcdefgh".index(move[2])]) == (
                2 * player + (crowned or piece in "8*")
            )
            assert not after.is_terminal() or (after.returns() == [0.0, 0.0]) == (quiet == 40)
            seen["continued"] += again
            seen["crowned"] += crowned
            seen["draws"] += quiet == 40
    assert all(seen.values())


def test_quoridor_names_walls_jumps_and_length():
    state = start("quoridor")
    assert f"After {state.get_game().max_game_length()} turns" in rules("quoridor")
    assert "You are pawn 0; your goal is row 1" in GAMES["quoridor"].describe(state, 0)
    assert "You are pawn @; your goal is row 7" in GAMES["quoridor"].describe(state, 1)
    play(state, ["d6", "d2", "d5", "d3", "d4"])
    assert {name for name in names(state) if name[-1] not in "vh"} == {"d2", "c3", "e3", "d5"}  # d5: over the pawn
    play(state, ["d4h"])
    assert GAMES["quoridor"].compact(state, 0) == "0 d4 d3 8 7 190 d4h"
    rows = GAMES["quoridor"].describe(state, 0).splitlines()
    assert rows[5].startswith(" 4 .   .   .   0")
    assert rows[6] == " " * 14 + "---+---"  # below d4 and e4
    play(state, ["c2h"])
    assert {name for name in names(state) if name[-1] not in "vh"} == {"c3", "e3", "c4", "e4"}  # walls behind both


def test_2048_directions_points_and_end():
    state = pyspiel.load_game("2048").new_initial_state()
    for chance in (0, 2):  # a 2 in the first two cells of the top row
        state.apply_action(chance)
    assert GAMES["2048"].compact(state, 0) == "2,2,0,0/0,0,0,0/0,0,0,0/0,0,0,0"
    assert names(state) == {"Right": 1, "Down": 2, "Left": 3}  # Up changes nothing
    for action, board in ((1, "0,0,0,4/0,"), (2, "0,0,0,0/0,0,0,0/0,0,0,0/2,2,0,0"), (3, "4,0,0,0/0,")):
        after = state.child(action)
        assert GAMES["2048"].compact(after, 0).startswith(board)
        assert after.returns() == [4.0 if action != 2 else 0.0]
    assert state.get_game().get_parameters()["max_tile"] == 2048


def test_blackjack_dealer_totals_and_payoff():
    values = {-1.0: 0, 0.0: 0, 1.0: 0}
    soft_17 = 0
    module = import_module("games.blackjack")
    for seed in range(400):
        *_, state = playthrough("blackjack", 0, seed)
        mine, dealer = (line.split("Cards:")[1].split() for line in str(state).splitlines() if "Cards:" in line)
        me, they = module._total(mine), module._total(dealer)
        won = -1.0 if me > 21 else 1.0 if they > 21 else float((me > they) - (me < they))
        assert state.returns() == [won]
        values[won] += 1
        if me <= 21:
            assert they >= 17
            assert module._total(dealer[:-1]) < 17 or len(dealer) == 2
        hard = sum(min("A23456789TJQK".index(card[1]) + 1, 10) for card in dealer)
        soft_17 += me <= 21 and they == 17 and hard == 7
    assert all(values.values())
    assert soft_17  # the dealer stops there
    assert module._total(["HT", "SK", "DA"]) == 21


def test_phantom_ttt_turn_stays_after_a_bump():
    state = play(start("phantom_ttt", 1), ["x(1,1)"])
    assert GAMES["phantom_ttt"].compact(state, 1) == "o .../.../... ?"
    play(state, ["o(1,1)"])
    assert state.current_player() == 1
    assert GAMES["phantom_ttt"].compact(state, 1) == "o .../.x./... ?4"
    play(state, ["o(0,2)"])
    assert state.current_player() == 0
    assert GAMES["phantom_ttt"].compact(state, 0) == "x .../.x./... 4??"
    assert "2" not in GAMES["phantom_ttt"].describe(state, 0)


def test_solitaire_scoring_waste_and_steps():
    to, revealed = {}, 0
    ranks = "A23456789TJQK"
    points = dict(zip(ranks, (100, 90, 80, 70, 60, 50, 40, 30, 20, 10, 10, 10, 10), strict=True))
    for seed in range(3):
        for state in playthrough("solitaire", 0, seed):
            if state.is_terminal():
                assert len(state.history()) == 150 or state.history()[-1] == 0
                break
            text = GAMES["solitaire"].describe(state, 0)
            playable = set(re.findall(r"\[(\S\S)\]", text))
            waste = set(re.findall(r"\S[♠♥♣♦]", text.splitlines()[0]))
            tops = set(re.findall(r"\S[♠♥♣♦]", text.splitlines()[1]))
            for name, action in names(state).items():
                if name == "kEnd":
                    continue
                target, card = name.split(" ← ")
                assert card not in waste or card in playable
                child = state.child(action)
                to_foundation = target in tops or target in "♠♥♣♦"
                expected = points[card[0]] * (to_foundation - (card in tops)) + 20 * (card in waste)
                expected += 20 * (card not in tops and child.is_chance_node())
                assert child.rewards() == [expected], name
                revealed += child.is_chance_node()
                to[to_foundation, card in tops, card in waste] = True
    assert revealed
    assert {(True, False, False), (False, True, False), (False, False, True)} <= set(to)
    assert "Steps left: 119." in GAMES["solitaire"].describe(start("solitaire"), 0)


def test_amazons_three_parts_and_the_vacated_square():
    state = start("amazons")
    assert all(name.startswith("X From") for name in names(state))
    assert names(state)["X From (6, 2)"] == 31  # row-major cell index
    play(state, ["X From (6, 2)"])
    assert GAMES["amazons"].compact(state, 0).endswith(" t31")
    play(state, ["X To (5, 2)"])
    assert "X Shoot: (6, 2)" in names(state)
    assert "now on (5, 2) shoots" in GAMES["amazons"].describe(state, 0)
    play(state, ["X Shoot: (6, 2)"])
    assert state.current_player() == 1
    assert GAMES["amazons"].compact(play(state.clone(), ["O From (1, 5)", "O To (4, 5)"]), 1).endswith(" s22")
    assert GAMES["amazons"].describe(state, 1).splitlines()[7].split() == ["6", ".", "#", ".", ".", "X", "."]
    for seed in range(10):
        *_, end = playthrough("amazons", 0, seed)
        assert len(end.history()) % 6 in (0, 3)
        assert end.returns() == ([-1.0, 1.0] if len(end.history()) % 6 == 0 else [1.0, -1.0])


# --- bridge ---


def bridge_score(contract, tricks, vulnerable):
    """Declarer's points as the rules text says; ``contract`` is (level, suit, 1 | 2 | 4)."""
    level, suit, factor = contract
    over = tricks - 6 - level
    if over < 0:
        if factor == 1:
            return over * (100 if vulnerable else 50)
        each = [200] + [300] * 12 if vulnerable else [100, 200, 200] + [300] * 10
        return -sum(each[:-over]) * factor // 2
    trick = 20 if suit in "♣♦" else 30
    points = (level * trick + 10 * (suit == "NT")) * factor
    bonus = (500 if vulnerable else 300) if points >= 100 else 50
    slam = {6: 750 if vulnerable else 500, 7: 1500 if vulnerable else 1000}.get(level, 0)
    extra = trick if factor == 1 else (100 if vulnerable else 50) * factor
    return points + bonus + slam + over * extra + 25 * factor * (factor > 1)


@pytest.mark.parametrize("c", [0, 1, 2])
def test_bridge_variants_auction_and_play(c):
    plays, vulnerable = c == 1, c == 2
    assert ("13 tricks" in rules("bridge", c), "Both sides are vulnerable" in rules("bridge", c)) == (plays, vulnerable)
    game, slam, grand = (bridge_score((n, "♠", 1), 6 + n, vulnerable) - 30 * n for n in (4, 6, 7))
    told = f"Bonus {game} if the contracted tricks reach 100 points, else 50; small slam {slam - game}, grand slam "
    over, doubly = (bridge_score((2, "♠", f), 9, vulnerable) - bridge_score((2, "♠", f), 8, vulnerable) for f in (2, 4))
    assert f"{told}{grand - game} more" in rules("bridge", c)
    assert f"Overtricks when doubled {over}, redoubled {doubly} each" in rules("bridge", c)
    down, first = -bridge_score((1, "♠", 1), 6, vulnerable), -bridge_score((1, "♠", 2), 6, vulnerable)
    assert f"opponents {down} each (doubled {first}, " in rules("bridge", c)
    state = start("bridge", c)
    assert (
        GAMES["bridge"]
        .describe(state, 0)
        .startswith(f"Dealer North\nVul: {'All' if vulnerable else 'None'}\n\nYou are North")
    )
    auction = play(state.clone(), ["1♥", "Pass", "Pass"])
    play(auction, ["Pass"])
    assert auction.is_terminal() != plays
    if plays:
        assert auction.current_player() == 1  # left of declarer North
        assert "Dummy" not in GAMES["bridge"].describe(auction, 1)
        auction.apply_action(auction.legal_actions()[0])
        assert auction.current_player() == 0  # declarer plays dummy's cards
        assert GAMES["bridge"].compact(auction, 0).endswith("|dummy")
        dummy = GAMES["bridge"].describe(auction, 3).split("Dummy is South; it holds:\n")[1].split("\n\n")[0]
        assert "|S" + "".join(dummy.split()) + "|" in GAMES["bridge"].compact(auction, 3)


@pytest.mark.parametrize("c", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)])
def test_bridge_scoring(c):
    plays, vulnerable, outcomes = c == 1, c == 2, set()
    state = start("bridge", c)
    assert play(state.clone(), ["Pass"] * 4).returns() == [0.0] * 4
    rng = random.Random(1)
    deals = [deal(state.get_game().new_initial_state(), rng) for _ in range(4)]  # each is analysed by the engine: slow
    for number in range(2000 if plays else 240):
        state = deals[number % 4].clone()
        while not state.is_terminal():
            calls = names(state)
            low = [a for n, a in calls.items() if n[0].isdigit()][: rng.choice((1, 1, 1, 6, 30))]
            state.apply_action(rng.choice(low + [a for n, a in calls.items() if not n[0].isdigit()]))
        text = str(state)
        bids = [
            item for item in text[text.index("West ") :].split()[4:] if re.fullmatch(r"\d(NT|[♣♦♥♠])|R?Dbl|Pass", item)
        ]
        last = max((i for i, bid in enumerate(bids) if bid[0].isdigit()), default=None)
        if last is None:
            continue
        factor = 4 if "RDbl" in bids[last:] else 2 if "Dbl" in bids[last:] else 1
        first = next(i for i, bid in enumerate(bids) if bid[1:] == bids[last][1:] and (i - last) % 2 == 0)
        tricks = int(re.findall(r"Declarer tricks(?: won)?: (\d+)", text)[0])
        expected = bridge_score((int(bids[last][0]), bids[last][1:], factor), tricks, vulnerable)
        assert [points * (-1) ** (seat - first) for seat, points in enumerate(state.returns())] == [expected] * 4
        outcomes.add((factor, expected > 0))
    assert outcomes >= {(factor, made) for factor in (1, 2, 4) for made in (True, False)}


# --- oware ---


def sow(houses, house, player):
    """Houses after sowing and the seeds captured, as the rules text says."""
    houses, seeds, at = list(houses), houses[house], house
    houses[house] = 0
    while seeds:
        at = (at + 1) % 12
        if at != house:
            houses[at] += 1
            seeds -= 1
    taken = list(houses)
    theirs = range(6 * (1 - player), 6 * (1 - player) + 6)
    while at in theirs and taken[at] in (2, 3):
        taken[at] = 0
        at -= 1
    if not any(taken[i] for i in theirs):
        return houses, 0
    return taken, sum(houses) - sum(taken)


@pytest.mark.parametrize("c", [0, 1, 2])
def test_oware_sowing_captures_and_ends(c):
    numbers = import_module("games.oware")._numbers
    seeds, ends = (4, 3, 5)[c], set()
    assert f"{12 * seeds} seeds" in rules("oware", c)
    for seed in range(40):
        seen = set()
        for before, player, action, after in steps("oware", c, seed):
            captured, houses = numbers(before)
            shown = f"Captured: you {captured[player]}, opponent {captured[1 - player]}."
            assert GAMES["oware"].describe(before, player).endswith(shown)
            must_feed = not any(houses[6 - 6 * player : 12 - 6 * player])
            movable = [h for h in range(6) if houses[6 * player + h] > (5 - h if must_feed else 0)]
            assert before.legal_actions() == movable
            houses, gain = sow(houses, 6 * player + action, player)
            captured[player] += gain
            if after.is_terminal():
                majority = max(captured) > 6 * seeds or captured == [6 * seeds] * 2
                theirs, mine = (sum(houses[6 * side : 6 * side + 6]) for side in (1 - player, player))
                assert majority or (1 - player, *houses) in seen or theirs == 0 or mine == 0
                ends.add("majority" if majority else "shared out")
                captured = [captured[0] + sum(houses[:6]), captured[1] + sum(houses[6:])]
                houses = [0] * 12
                assert after.returns()[0] == (captured[0] > captured[1]) - (captured[0] < captured[1])
            assert numbers(after) == (captured, houses)
            seen.add((player, *numbers(before)[1]))
    assert ends == {"majority", "shared out"}
