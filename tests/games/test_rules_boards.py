"""What the rules texts of the board games claim, held against the engine."""

import random
import re
from collections import Counter

import pytest
from games_support import from_history, load, play, playthrough, prompts, rules


def test_tic_tac_toe_rules():
    state = from_history(load("tic_tac_toe"), [5, 0])
    for action in state.legal_actions():
        assert state.action_to_string(0, action) == f"x({action // 3},{action % 3})"
    assert prompts("tic_tac_toe", state, 0) == ("You play x.\n  0 1 2\n0 o . .\n1 . . x\n2 . . .", "-a+f")
    assert prompts("tic_tac_toe", state, 1)[1] == "+a-f"
    assert from_history(load("tic_tac_toe"), [0, 1, 4, 2, 8]).returns() == [1, -1]


def test_connect_four_rules():
    game = load("connect_four")
    state = from_history(game, [3, 3, 0])
    assert state.action_to_string(1, 3) == "o3"
    assert prompts("connect_four", state, 1)[1] == "-aa-da+db"
    assert prompts("connect_four", state, 0)[1] == "+aa+da-db"
    assert prompts("connect_four", game.new_initial_state(), 0)[1] == "."
    assert prompts("connect_four", state, 0)[0].endswith("\n. . . o . . .\nx . . x . . .")
    for win in ([0, 6, 1, 6, 2, 6, 3], [0, 6, 0, 6, 0, 5, 0], [0, 1, 1, 2, 2, 3, 2, 3, 3, 6, 3]):
        assert from_history(game, win).returns() == [1, -1]
    assert from_history(game, [0] * 6).legal_actions() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "config_id", "size"), [("hex", 0, 5), ("hex", 3, 11), ("hex_small", 0, 3), ("hex_small", 1, 4)]
)
def test_hex_rules(name, config_id, size):
    game = load(name, config_id)
    start = game.new_initial_state()
    for action in start.legal_actions():
        assert start.action_to_string(0, action) == f"{chr(ord('a') + action % size)}{action // size + 1}"
    column = [k * size for k in range(size)]
    row = list(range(1, size))
    down = [cell for pair in zip(column, [1 + k for k in column], strict=True) for cell in pair][:-1]
    assert from_history(game, down).returns() == [1, -1]
    across = [cell for pair in zip([size * (size - 1) + k for k in row], row, strict=True) for cell in pair]
    assert from_history(game, [size + 1, 0, *across][: 2 + len(across)]).returns() == [-1, 1]
    assert f"{size}x{size}" in rules(name, config_id)


def test_hex_neighbours_and_drawing():
    """b2 of the 3x3 board touches exactly the six cells the rules name: x walks through it from each to each."""
    state = from_history(load("hex_small"), [2, 0])
    assert prompts("hex_small", state, 0) == (
        "You play x and connect top to bottom.\n   a b c\n 1 o . x\n  2 . . .\n   3 . . .",
        "v3-a+c",
    )
    assert prompts("hex_small", state, 1)[1] == "h3+a-c"
    ids = {chr(ord("a") + i % 3) + str(i // 3 + 1): i for i in range(9)}
    game = load("hex_small")
    wins = set()
    for top in ("a1", "b1", "c1"):
        for bottom in ("a3", "b3", "c3"):
            others = [c for c in ids if c not in (top, bottom, "b2")][:2]
            play = [ids[top], ids[others[0]], ids["b2"], ids[others[1]], ids[bottom]]
            state = from_history(game, play)
            if state.is_terminal() and state.returns()[0] > 0:
                wins.add((top, bottom))
    assert wins == {("b1", "a3"), ("b1", "b3"), ("c1", "a3"), ("c1", "b3")}


def test_othello_rules():
    state = load("othello").new_initial_state()
    for action in range(64):
        assert state.action_to_string(0, action) == f"{'abcdefgh'[action % 8]}{action // 8 + 1}"
    assert state.action_to_string(0, 64) == "pass"
    play(state, ["d3"])
    full, compact = prompts("othello", state, 1)
    assert full.startswith("You play o. Discs: you 1, opponent 4.\n  a b c d e f g h\n1 - -")
    assert "\n3 - - - x - - - -\n4 - - - x x - - -\n" in full
    assert compact.split("/")[2:5] == ["...o....", "...oo...", "...ox..."]
    for seed in range(5):
        *_, over = playthrough("othello", seed=seed)
        own, other = map(int, re.findall(r"\d+", prompts("othello", over, 0)[0])[:2])
        assert over.returns()[0] == (own > other) - (own < other)


@pytest.mark.parametrize("config_id", range(3))
def test_clobber_rules(config_id):
    for state in playthrough("clobber", config_id):
        if state.is_terminal():
            break
        seat = state.current_player()
        full, compact = prompts("clobber", state, seat)
        head, *rows = full.splitlines()
        assert head == f"You play {'ox'[seat]}."
        assert compact[0] == {"ox"[seat]: "x", "xo"[seat]: "o", ".": "."}[rows[0][2]]
        cell = {f"{chr(ord('a') + i)}{r[0]}": c for r in rows[:-1] for i, c in enumerate(r[2:].split())}
        for action in state.legal_actions():
            move = state.action_to_string(seat, action)
            assert cell[move[:2]] == "ox"[seat]
            assert cell[move[2:]] == "xo"[seat]
        last = seat
    assert state.returns()[last] == 1  # the last player to move wins
    size = 5 + config_id
    assert f"{size} rows and {size} columns" in rules("clobber", config_id)


@pytest.mark.parametrize("config_id", range(3))
def test_dots_and_boxes_rules(config_id):
    size = 3 + config_id
    start = load("dots_and_boxes", config_id).new_initial_state()
    for row in range(size + 1):
        for col in range(size):
            assert start.action_to_string(0, size * row + col) == f"P1(h,{row},{col})"
            vertical = size * (size + 1) + (size + 1) * col + row
            assert start.action_to_string(1, vertical) == f"P2(v,{col},{row})"
    box = [0, size, size * (size + 1), size * (size + 1) + 1]
    state = from_history(load("dots_and_boxes", config_id), box)
    assert state.current_player() == 1  # the fourth line closed the box, so Player 1 moves again
    full, compact = prompts("dots_and_boxes", state, 1)
    assert full.startswith("Boxes: you 1, opponent 0.")
    assert full.splitlines()[1].startswith("+---+   ")
    assert full.splitlines()[2].startswith("| Y |")
    assert compact.startswith("1" + "0" * (size - 1) + "/")
    assert compact.split("|")[2].startswith("x.")
    assert prompts("dots_and_boxes", state, 0)[1].split("|")[2].startswith("o.")
    *_, over = playthrough("dots_and_boxes", config_id)
    own, other = map(int, re.findall(r"\d+", prompts("dots_and_boxes", over, 0)[0])[:2])
    assert own + other == size * size
    assert over.returns()[0] == (own > other) - (own < other)


def test_backgammon_rules():
    start = load("backgammon").new_initial_state()
    opening = {start.action_to_string(-1, a)[-22:]: a for a in start.legal_actions()}
    state = from_history(load("backgammon"), [a for text, a in opening.items() if "O starts, (roll: 64)" in text])
    full, compact = prompts("backgammon", state, 1)
    assert full.splitlines()[1] == "Your checkers (your point:count): 24:2 13:5 8:3 6:5"
    assert full.splitlines()[3] == "Opponent's checkers (your point:count): 19:5 17:3 12:5 1:2"
    assert compact == "46 B....e.c...Ee...C.E....b 0-0 0-0"


def men(state, seat):
    """Return (own, opposing) checkers in the numbering of ``seat``: {point: count}, the bar as 'Bar'."""
    lines = prompts("backgammon", state, seat)[0].splitlines()
    sides = []
    for line, bar_line in ((lines[1], lines[2]), (lines[3], lines[4])):
        counts = {point: int(n) for point, n in re.findall(r"(\d+):(\d+)", line)}
        bar, off = re.findall(r"\d+", bar_line)
        sides.append(Counter({**counts, "Bar": int(bar), "Off": int(off)}))
    return sides


def test_backgammon_move_names_mean_what_the_rules_say():
    """Numbering, hits, entering, bearing off and doubles: the name applied to the prompt gives the next prompt."""
    kinds: Counter = Counter()
    rng = random.Random(0)
    for seed in range(8):
        for state in playthrough("backgammon", seed=seed):
            if state.is_terminal():
                break
            seat, action = state.current_player(), rng.choice(state.legal_actions())
            name = state.action_to_string(seat, action)
            own, other = men(state, seat)
            for move in name.rpartition(" - ")[2].replace("Pass", "").split():
                path, times = re.findall(r"([^(]+)(?:\((\d)\))?", move)[0]
                start, *stops = path.split("/")
                own[start] -= int(times or 1)
                own[stops[-1].rstrip("*")] += int(times or 1)
                for stop in stops:
                    if stop.endswith("*"):
                        other[stop[:-1]] -= 1
                        other["Bar"] += 1
                kinds.update(k for k in ("Bar", "Off", "*", "(2)") if k in move)
            after = state.child(action)
            assert [+side for side in men(after, seat)] == [+own, +other], name
            double = (
                re.search(r"Dice: (\d) \1$", prompts("backgammon", state, seat)[0], re.M) and after.is_player_node()
            )
            if double:
                kinds["second"] += 1
                assert "second action" in prompts("backgammon", after, seat)[0]
    assert min(kinds[k] for k in ("Bar", "Off", "*", "(2)", "second")) > 3
