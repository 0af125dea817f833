import base64
import dataclasses
import hashlib
import itertools
import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyspiel
import pytest
from chromium import CHROMIUM, Browser

import games
from envs.openspiel import load_game, replay, score
from envs.prompts import user_message
from scripts import visualize
from scripts.report import markdown
from scripts.report.replay import replayable
from scripts.visualize import draw_curves
from training.metrics import MetricsLog
from training.process import lock_run

ROOT = Path(__file__).resolve().parents[2]
SHOWN = (
    "tic_tac_toe", "hex", "leduc_poker", "chess", "goofspiel", "liars_dice", "connect_four", "go", "hearts",
    "clobber", "othello", "checkers", "amazons", "2048", "phantom_ttt", "kuhn_poker", "backgammon",
)  # fmt: skip
AS_TEXT = ("hearts", "backgammon")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """No curves, which take half a second: tests that look at them call ``draw_curves``."""
    monkeypatch.setattr(visualize, "draw_curves", lambda runs, path: path.write_bytes(b"") or path)


def play(name, seed, step=0, config_id=None):
    """A real game of a soft random player against a random opponent, as an episodes.jsonl row."""
    rng = random.Random(seed)
    task_id = games.NAMES.index(name) * games.CONFIGS_PER_GAME + (seed if config_id is None else config_id)
    game, spiel = games.GAMES[games.NAMES.index(name)], load_game(task_id)
    seat, history = seed % spiel.num_players(), []
    turns: list[dict] = []

    def choose(state, player):
        legal = {a: state.action_to_string(player, a) for a in state.legal_actions(player)}
        action = rng.choice(list(legal))
        if player == seat and len(legal) > 1:
            weights = np.array([rng.gammavariate(0.6, 1) + 1e-9 for _ in legal])
            probs = dict(zip(legal, weights / weights.sum(), strict=True))
            action = rng.choices(list(probs), list(probs.values()))[0]
            turn = {"seat": seat, "user": user_message(game, state, seat, legal, "full"), "answer": str(action)}
            turn |= {"action": action, "legal": legal, "probs": probs, "value": rng.uniform(-1, 1), "state": str(state)}
            rules = game.rules(game.params(task_id % games.CONFIGS_PER_GAME))
            turns.append(turn if turns else {"system": rules, **turn})
        return action

    state = spiel.new_initial_state()
    while not state.is_terminal():
        if state.is_simultaneous_node():
            moves = [[p, choose(state, p)] for p in range(spiel.num_players())]
            state.apply_actions([a for _, a in moves])
        else:
            p = state.current_player()
            chance = state.is_chance_node() and rng.choices(*zip(*state.chance_outcomes(), strict=True))[0]
            moves = [[p, chance if state.is_chance_node() else choose(state, p)]]
            state.apply_action(moves[0][1])
        history += moves
    row = {"step": step, "game": name, "task_id": task_id, "seed": seed, "opponent": "random", "seat": seat}
    row |= {"score": score(spiel, state.returns(), seat), "outcome": "finished", "returns": state.returns()}
    return json.loads(json.dumps({**row, "history": history, "turns": turns}))


def metrics(steps, seed):
    """Rows shaped like training's: score and success of real tic-tac-toe games, the rest smooth with noise."""
    rng = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        done = step / steps
        wins = [play_fast(rng, skill=done) for _ in range(16)]
        noise = rng.normal(size=8)
        yield {
            **{"step": step, "stage": "easy" if done < 0.4 else "hard", "games": 16},
            "opponents": {"random": 16} if done < 0.4 else {"random": 8, "mcts:50x1": 8},
            **{"score_mean": float(np.mean(wins)), "success_rate": float(np.mean(np.array(wins) > 0.5))},
            "score/tic_tac_toe": float(np.mean(wins[:8])),
            **{"score/leduc_poker": 0.5 + 0.1 * done + 0.03 * noise[0], "kl_ref": 0.3 * done + 0.01 * abs(noise[1])},
            **{"update_kl": 0.01 + 0.002 * noise[2], "kl_coef": 0.2, "entropy": 1.2 - 0.8 * done + 0.02 * noise[3]},
            **{"clip_fraction": 0.08 + 0.02 * noise[4], "explained_variance": math.tanh(3 * done) + 0.03 * noise[5]},
            **{"legal_mass": 1 - 0.6 * math.exp(-4 * done), "learning_rate": 3e-3 * (1 - 0.9 * done)},
            **{"games_per_s": 900 + 30 * noise[6], "decisions_per_s": 2500 + 90 * noise[7], "memory_mb": 612.0},
            **{"buffer_size": min(1000, 12 * step), "policy_loss": -0.01, "value_loss": 0.4 - 0.2 * done},
            **({"stage_change": "hard", "stage_reason": "success 0.81"} if step == round(0.4 * steps) else {}),
            **({"eval/tic_tac_toe": 0.5 + 0.4 * done} if step % 20 == 0 else {}),
        }


def play_fast(rng, skill):
    """Score of one game of a player that takes a winning tic-tac-toe move with probability ``skill``."""
    state = load_game(games.NAMES.index("tic_tac_toe") * games.CONFIGS_PER_GAME).new_initial_state()
    seat = int(rng.integers(2))
    while not state.is_terminal():
        action = int(rng.choice(state.legal_actions()))
        if state.current_player() == seat and rng.random() < skill:
            wins = [a for a in state.legal_actions() if state.child(a).returns()[seat] > 0]
            action = wins[0] if wins else action
        state.apply_action(action)
    return (state.returns()[seat] + 1) / 2


def write_run(directory, steps=80, seed=0, shown=SHOWN):
    directory.mkdir()
    lines = [json.dumps(row) for row in metrics(steps, seed)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    rows = [play(name, seed=3 + seed + i, step=20 * i) for i in range(2) for name in shown]
    (directory / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"model_name": "tiny", "lora": {"r": 16}},
        "ppo": {"learning_rate": 3e-3 * (1 + seed), "batch_size": 16},
    }
    (directory / "run_config.json").write_text(json.dumps(config))
    entry = {"before": 0.02, "after": 0.81, "interval": [0.78, 0.84], "ceiling": 0.96, "share": 0.84, "exact": True}
    open_entry = {"before": 0.1, "after": 0.6, "interval": [0.5, 0.7], "ceiling": None, "share": None, "exact": False}
    summary = {"mean_share_of_ceiling": 0.84, "games": {"tic_tac_toe": entry, "connect_four": open_entry}}
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "first")


def embedded(page):
    text = page.read_text(encoding="utf-8")
    return json.loads(text.split('id="data">')[1].split("</script>")[0])


def drawn_on_the_page(run, episodes):
    """What the page's script draws of a run with these episodes: [element, markup], in order."""
    (run / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in episodes))
    page = visualize.write_report([visualize.load_run(run)], run / "report.html")
    return json.loads(subprocess.run(["node", STUB, page], capture_output=True, text=True, check=True).stdout)


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


# --- Curves ------------------------------------------------------------------------------------------------------


def test_the_keys_of_the_rows_are_collected_once_for_all_panels():
    walks = list[int]()

    class Row(dict):
        def __iter__(self):
            walks.append(self["step"])
            return super().__iter__()

    rows: list[dict] = [Row(step=step, score_mean=0.5, entropy=1.0, grad_norm=0.1) for step in range(1, 4)]
    drawn = visualize.panels([visualize.RunData("run", rows, {}, {}, [], {})])
    assert [panel["title"] for panel in drawn] == ["Entropy", "Score", "Gradient norm"]
    assert walks == [1, 2, 3]


def test_a_game_that_failed_before_anything_was_asked_has_a_frame_to_show():
    row = {"step": 1, "game": "trace", "task_id": 0, "outcome": "failed", "history": None, "turns": []}
    [frame] = replayable(row)["frames"]
    assert frame["state"] == "Nothing was asked: the game failed."


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
def test_words_are_not_drawn_as_a_position(tmp_path):
    """In kuhn_poker the cards were "Nothing" and "was"; a prompt of a server's game that failed became a board."""
    write_run(run := tmp_path / "run", steps=9, shown=[])
    row = {"step": 1, "game": "kuhn_poker", "task_id": 0, "outcome": "failed", "history": None, "turns": []}
    turn = {"seat": 0, "user": "Your card: King", "answer": "0", "action": 0, "legal": {"0": "a"}, "probs": {}}
    rows = [row, row | {"turns": [turn]}, row | {"turns": [turn | {"state": "0 1 pb"}]}]
    boards = [*dict.fromkeys(markup for element, markup in drawn_on_the_page(run, rows) if element == "board")]
    assert len(boards) == 3
    assert boards[:2] == ["<pre>Nothing was asked: the game failed.</pre>", "<pre>Your card: King</pre>"]
    assert all("cards" in board for board in boards[2:])


def test_what_a_link_in_the_runs_folder_leads_to_is_kept(run_dir, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "curves.png").symlink_to(tmp_path / "mine.txt")
    draw_curves([visualize.load_run(run_dir)], tmp_path / "curves.png")
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_draw_curves_writes_a_picture_that_grows_with_the_keys(run_dir, tmp_path):
    def draw(folder):
        return draw_curves([visualize.load_run(folder)], tmp_path / "curves.png")

    width, height = png_size(draw(run_dir))
    few = tmp_path / "few"
    few.mkdir()
    (few / "metrics.jsonl").write_text('{"step": 1, "score_mean": 0.5}\n{"step": 2, "score_mean": 0.6}\n')
    assert png_size(draw(few))[1] < height
    assert width >= 1200


def test_without_matplotlib_there_is_a_report(run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(visualize, "draw_curves", draw_curves)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert visualize.main(["--run", str(run_dir), "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: no curves.png: import of matplotlib")
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.md"}
    (tmp_path / "file").write_text("")
    assert visualize.main(["--run", str(run_dir), "--output", str(tmp_path / "file")]) == 2
    assert "file: cannot be written" in capsys.readouterr().err


def test_matplotlib_is_imported_only_to_draw():
    code = (
        "import sys; from scripts import visualize; sys.exit('matplotlib' in sys.modules or 'pyspiel' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_rolling_mean_and_its_band():
    mean, low, high = visualize.rolling([0.0, 1.0, 0.0, 1.0, 1.0, 1.0], window=5)
    assert mean == pytest.approx([0, 0.5, 1 / 3, 0.5, 0.6, 0.8])
    assert high[-1] - mean[-1] == pytest.approx(2.776 * 0.2, rel=1e-3)  # of Student's t with 4 degrees of freedom
    assert high[:4] == low[:4] == mean[:4], "of so few values it would be wider than what is drawn"
    assert np.subtract(mean, low) == pytest.approx(np.subtract(high, mean))
    assert low[0] == high[0] == 0
    for values in visualize.rolling([1.0, math.nan, 3.0], window=5):
        assert [math.isnan(value) for value in values] == [False, True, False], "a step without a value has no mean"


def test_panels_are_of_metrics_that_there_are():
    page = Path(visualize.__file__).parents[1] / "docs" / "metrics.md"
    explained = {"opponent/", *re.findall(r"`([a-z_]+/?)", page.read_text())}
    assert {key for panel in visualize.PANELS for key in panel.keys} <= explained


def test_panels_hold_the_finite_numbers_of_their_keys_and_gaps_where_there_is_none():
    rows: list[dict] = [{"step": 1, "kl_ref": 0.1, "update_kl": float("nan"), "score/hex": 1}]
    rows += [
        {"step": 2, "kl_ref": None},
        {"step": 3, "kl_ref": 0.3, "score/go": 0.5, "score/chess": 0.0, "truncated": True, "entropy": 0.0},
    ]
    run = visualize.RunData("r", rows, {}, {}, [], {})
    found = {p.title: visualize.panel_lines(p, [run]) for p in visualize.PANELS}
    [line] = found["KL"]
    assert (line["label"], line["x"], repr(line["y"])) == ("kl_ref", [1, 2, 3], "[0.1, nan, 0.3]")
    assert [s["label"] for s in found["Score by game"]] == ["chess", "go", "hex"]  # what is never won, too
    assert not found["Games cut short and answers retried"]
    assert not found["Entropy"]


def test_opponent_shares_of_games(tmp_path):
    rows: list[dict] = [{"step": 1, "opponents": {"random": 8}}, {"step": 2, "opponents": {"random": 4, "mcts": 4}}]
    rows += [{"step": 3}, {"step": 4, "opponents": {}}]

    def shares(lines):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        panels = visualize.panels([visualize.load_run(tmp_path)])
        return [(line["label"], line["x"], line["mean"]) for p in panels for line in p["lines"]]

    assert shares(rows) == [("mcts", [1, 2], [0.0, 0.25]), ("random", [1, 2], [1.0, 0.75])]
    assert shares(rows[:1]) == []
    selves = [{"step": n, "opponents": {"random": 2, f"past:step-{n}": 1, f"past:step-{n + 1}": 1}} for n in (1, 2)]
    assert shares(selves) == [("past", [1, 2], [0.5, 0.5]), ("random", [1, 2], [0.5, 0.5])]
    mixes = (["random"], 5, {"a": 0, "b": 0}, {"a": "x"}, {"a": -1, "random": 2})
    for mix in mixes:  # as the last row of a run
        shares([{"step": 1, "opponents": mix}])
        visualize.heading(visualize.load_run(tmp_path))
    mixes = (["random"], "mcts", {"a": 0, "b": 0}, {"a": "x"}, {"a": -1, "random": 2})
    odd = [{"step": 5 + n, "opponents": mix} for n, mix in enumerate(mixes)]
    assert [(label, steps) for label, steps, _ in shares([*rows, *odd])] == [("mcts", [1, 2, 9]), ("random", [1, 2, 9])]


# --- Replays -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHOWN)
def test_a_replay_shows_every_position_and_every_decision(name):
    episode = play(name, seed=5)
    shown = replayable(episode)
    moves = [move for frame in shown["frames"] for move in frame["moves"]]
    assert [[m["player"], m["action"]] for m in moves] == episode["history"]
    assert [i for frame in shown["frames"] for i in frame["turns"]] == list(range(len(episode["turns"])))
    for frame in shown["frames"]:
        for turn in (episode["turns"][i] for i in frame["turns"]):
            move = next(m for m in frame["moves"] if m["player"] == turn["seat"])
            assert (move["action"], frame["state"]) == (turn["action"], turn["state"])
            assert move["name"] == turn["legal"][str(turn["action"])]
    without_states = {**episode, "turns": [{k: v for k, v in t.items() if k != "state"} for t in episode["turns"]]}
    assert [f["turns"] for f in replayable(without_states)["frames"]] == [f["turns"] for f in shown["frames"]]


def test_cards_are_called_by_their_names():
    deals = {
        name: replayable(play(name, seed=5))["frames"][0]["moves"] for name in ("leduc_poker", "kuhn_poker", "hearts")
    }
    cards = {"Jack", "Queen", "King"}
    assert {move["name"].split()[0] for name in ("leduc_poker", "kuhn_poker") for move in deals[name]} <= cards
    assert deals["leduc_poker"][0]["name"].endswith((" of hearts", " of spades"))
    assert deals["hearts"][1]["name"][1] in "CDHS"  # of OpenSpiel's own


def test_every_chance_event_that_is_drawn_can_be_replayed():
    """In hearts without passing, legal_actions names one pass direction and chance draws all four."""
    task_id = games.NAMES.index("hearts") * games.CONFIGS_PER_GAME
    drawn = [play("hearts", seed, config_id=0) for seed in range(8)]
    assert len({episode["history"][0][1] for episode in drawn}) > 1
    assert load_game(task_id).new_initial_state().legal_actions() == [0]
    for episode in drawn:
        assert replayable(episode)["frames"][-1]["moves"] == []


def test_failed_answers_belong_to_the_decision_they_failed():
    episode = play("tic_tac_toe", seed=4)
    failed = {**episode["turns"][1], "answer": "well", "action": None}
    episode["turns"].insert(1, failed)
    assert [f["turns"] for f in replayable(episode)["frames"] if f["turns"]][:2] == [[0], [1, 2]]


def test_an_episode_without_a_game_is_shown_turn_by_turn():
    turns = [{"seat": 0, "user": "print(1)", "answer": "1", "action": None}]
    assert replayable({"game": "trace", "history": None, "turns": turns})["frames"] == [
        {"state": "print(1)", "words": True, "moves": [], "turns": [0]}
    ]


def test_a_move_is_checked_before_anybody_names_it():
    """The engine names a card by an address, whatever its number."""
    with pytest.raises(ValueError, match=r"the moves \[\[-1, 1073741824\]\] of its history cannot be played after 0"):
        next(replay(load_game(8 * games.CONFIGS_PER_GAME), [[-1, 2**30]]))


def test_a_history_that_cannot_be_replayed_here_is_shown_turn_by_turn(tmp_path, capsys):
    """It is damaged, or of a game of one's own that is gone; the rest of the report is worth as much as ever."""
    episode = play("tic_tac_toe", seed=4)
    at, states = episode["history"][0], [turn["state"] for turn in episode["turns"]]
    ids = {"task_id": (moved := episode["task_id"] + games.CONFIGS_PER_GAME)}, {"task_id": 2**40}, {"task_id": None}
    histories = [at, [1, at[1]]], [at, [0, 99]], [[0]], 5, [5]
    wrong = [{**episode, **part} for part in (*ids, *({"history": moves} for moves in histories))]
    for row in wrong:
        shown = replayable(row)
        assert shown["lost"]
        assert [frame["state"] for frame in shown["frames"]] == states
        assert [frame["turns"] for frame in shown["frames"]] == [[i] for i in range(len(states))]
    assert re.fullmatch(rf"task {moved} is of \w+ here", replayable(wrong[0])["lost"])
    assert "lost" not in replayable(episode)

    write_run(run := tmp_path / "run", steps=9, shown=[])
    (run / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (wrong[0], episode, wrong[1])))
    assert visualize.main(["--run", str(run)]) == 0
    [line] = capsys.readouterr().err.splitlines()
    told = f"step 0, tic_tac_toe: task {moved} is of "
    assert line.startswith(f"WARNING: run: 2 of 3 games are shown turn by turn: {told}")
    assert ["lost" in row for row in embedded(run / "report.html")["runs"][0]["episodes"]] == [True, False, True]


# --- Command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "marker"), [(1, "o"), (2, "")])
def test_a_run_of_one_step_has_points(tmp_path, monkeypatch, steps, marker):
    from matplotlib.figure import Figure

    markers: list[str] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda f, *_, **__: markers.extend(a.lines[-1].get_marker() for a in f.axes if a.lines)
    )
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "entropy": 1.0}}\n' for n in range(1, steps + 1)))
    draw_curves([visualize.load_run(tmp_path)], tmp_path / "curves.png")
    assert markers == [marker]


def test_numbers_that_hardly_change_are_drawn_as_they_are(tmp_path, monkeypatch):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    texts: list[str] = []

    def look(figure, *args, **options):
        FigureCanvasAgg(figure).draw()
        texts.extend(axis.yaxis.get_offset_text().get_text() for axis in figure.axes)

    monkeypatch.setattr(Figure, "savefig", look)
    run = visualize.load_run(write_run(tmp_path / "run", steps=9))
    for row in run.rows:
        row["memory_mb"] = 956 + 0.01 * (row["step"] > 4)
    draw_curves([run], tmp_path / "curves.png")
    assert len(texts) > 5
    assert not any(texts)


def test_long_names_leave_the_curves_their_room(tmp_path, monkeypatch):
    """Drawn whole they leave the panels none, and matplotlib warns of it."""
    from matplotlib.figure import Figure

    shown = []

    def look(figure, *_, **__):
        shown.append(figure.get_suptitle())
        shown.extend(text.get_text() for axis in figure.axes if axis.get_legend() for text in axis.get_legend().texts)

    monkeypatch.setattr(Figure, "savefig", look)
    runs = [visualize.load_run(write_run(tmp_path / f"{'long' * 50}{seed}", steps=3)) for seed in range(2)]
    draw_curves(runs, tmp_path / "curves.png")
    short = [f"longlonglong…onglonglong{seed}" for seed in range(2)]
    assert shown[0] == " · ".join(short)
    assert all(text.endswith(tuple(short)) for text in shown[1:])
    draw_curves([dataclasses.replace(runs[0], name="a" * 80)], tmp_path / "curves.png")
    assert "a" * 80 in shown


def test_a_name_that_the_font_has_no_letters_for_is_no_warning(run_dir, tmp_path, recwarn):
    run = dataclasses.replace(visualize.load_run(run_dir), name="\u65e5\u672c\u8a9e")
    assert png_size(draw_curves([run], tmp_path / "curves.png"))[0] >= 1200
    assert not recwarn.list


def test_a_line_says_whose_it_is_where_other_runs_have_none(tmp_path, monkeypatch):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = {}

    def look(figure, *_, **__):
        FigureCanvasAgg(figure).draw()
        for axis in [axis for axis in figure.axes if axis.lines]:
            legend = [text.get_text() for text in axis.get_legend().texts] if axis.get_legend() else []
            drawn[axis.get_title(loc="left")] = legend, {tick % 1 for tick in axis.get_xticks()}

    monkeypatch.setattr(Figure, "savefig", look)
    runs = [visualize.load_run(write_run(tmp_path / name, steps=3)) for name in ("first", "second")]
    for row in runs[1].rows:
        row["state_loss"] = 1.0
    draw_curves(runs, tmp_path / "curves.png")
    assert drawn["Reading the position  (nats a decision)"][0] == ["second"]
    assert {part for _, parts in drawn.values() for part in parts} == {0.0}, "there is no half a step"


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_a_line_that_is_alone_says_what_it_is_of(tmp_path, monkeypatch, names):
    """The only line below "Games cut short and answers retried" was of either, and a game alone had no name."""
    from matplotlib.figure import Figure

    drawn = {}

    def look(figure, *_, **__):
        for axis in [axis for axis in figure.axes if axis.lines]:
            legend = axis.get_legend()
            names = [text.get_text() for text in legend.texts] if legend else []
            drawn[axis.get_title(loc="left").partition("  ")[0]] = names

    monkeypatch.setattr(Figure, "savefig", look)
    for name in names:
        row = {"step": 1, "score/hex": 0.5, "eval/hex": 0.5, "update_kl": 0.1, "forfeited": 3, "kl_coef": 0.1}
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    runs = [visualize.load_run(tmp_path / name) for name in names]
    draw_curves(runs, tmp_path / "curves.png")
    several = {"Score by game": "hex", "Evaluation": "hex", "KL": "update_kl",
               "Games cut short and answers retried": "forfeited"}  # fmt: skip
    whose = [f", {name}" for name in names] if len(names) > 1 else [""]
    expected = {title: [f"{key}{of}" for of in whose] for title, key in several.items()}
    assert drawn == expected | {"KL coefficient": names if len(names) > 1 else []}
    page = visualize.write_report(runs, tmp_path / "report.html")
    lines = {panel["title"]: [line["label"] for line in panel["lines"]] for panel in embedded(page)["panels"]}
    assert {title: labels for title, labels in lines.items() if title in several} == expected
    if shutil.which("node"):
        said = subprocess.run(["node", STUB, page], capture_output=True, text=True, check=True).stdout
        assert said.count('<div class=\\"legend\\"><span') == len(several) + (len(names) > 1)


def test_names_in_the_curves_lie_neither_on_each_other_nor_on_the_lines(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    scores = {f"score/g{n}": 0.5 for n in range(5)}
    changes = {50: "near", 52: "nearer", 53: "nearest", 120: "far"}
    rows = [{"step": n, "score_mean": 0.5, **scores} | ({"stage_change": changes[n]} if n in changes else {})
            for n in range(1, 301)]  # fmt: skip
    draw_curves([visualize.RunData("a", rows, {}, {}, [], {})], tmp_path / "curves.png")
    [figure] = figures
    axes = {axis.get_title(loc="left").partition("  ")[0]: axis for axis in figure.axes if axis.lines}
    assert [text.get_text() for text in axes["Score"].texts] == ["near", "far"]
    assert len(axes["Score"].lines) == 2 + len(changes)
    figure.draw_without_rendering()
    legend, panel = axes["Score by game"].get_legend().get_window_extent(), axes["Score by game"].get_window_extent()
    assert legend.x0 >= panel.x1


def test_one_step_has_no_steps_beside_it(tmp_path, monkeypatch):
    """The axis went from 0.96 to 1.04."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw_curves([visualize.RunData("a", [{"step": 1, "entropy": 0.5}], {}, {}, [], {})], tmp_path / "curves.png")
    [figure] = figures
    low, high = figure.axes[0].get_xlim()
    assert [tick for tick in figure.axes[0].get_xticks() if low <= tick <= high] == [1]


def test_an_evaluation_says_whether_it_is_a_share_or_a_value(tmp_path):
    """0.5 of the ceiling in one game and a mean value of 0.5 in another were one and the same."""
    rows = [{"step": 1, "eval/hex": 0.5, "eval/leduc_poker": 0.5, "eval/go": 0.5, "eval/one": 0.5}]
    known = {"leduc_poker": {"exact": True, "share": 0.5}, "hex": {"exact": False, "share": 0.5},
             "go": {"exact": True, "share": None}}  # fmt: skip
    run = visualize.RunData("a", rows, {}, {"games": known}, [], {})
    [panel] = visualize.panels([run])
    names = ["go (value)", "hex (value)", "leduc_poker (share)", "one"]
    assert [line["label"] for line in panel["lines"]] == names
    del rows[0]["eval/leduc_poker"], rows[0]["eval/one"]
    alike = dataclasses.replace(run)  # all are values, as the first table says
    assert [line["label"] for panel in visualize.panels([alike]) for line in panel["lines"]] == ["go", "hex"]


def test_what_lies_in_a_folder_of_yours_is_not_replaced(run_dir, tmp_path, capsys):
    output = tmp_path / "mine"
    output.mkdir()
    for name in ("report.md", "report.html", "curves.png"):
        (output / name).write_text("my notes")
        assert visualize.main(["--run", str(run_dir), "--output", str(output)]) == 2
        told = f"error: --output {output}: {name} is there, and no report.html of this program; name another\n"
        assert capsys.readouterr().err == told
        assert [path.read_text() for path in output.iterdir()] == ["my notes"]
        (output / name).unlink()
    for _ in range(2):  # what is there by this program is
        assert visualize.main(["--run", str(run_dir), "--output", str(output)]) == 0


def test_the_report_of_a_run_that_is_not_drawn_is_kept(run_dir, tmp_path, capsys):
    other = write_run(tmp_path / "other", steps=3)
    (other / "report.html").write_bytes(visualize.MARK)
    assert visualize.main(["--run", str(run_dir), "--output", str(other)]) == 2
    assert capsys.readouterr().err == f"error: --output {other}: is the folder of another run; name another\n"
    assert (other / "report.html").read_bytes() == visualize.MARK
    visualize._must_be_own(other, [run_dir, other])  # is drawn, too


def test_runs_of_one_name_are_told_apart(tmp_path):
    for folder in ("a", "b", "c/a"):
        (tmp_path / folder).mkdir(parents=True)
    runs = [write_run(tmp_path / folder / "seed0", steps=3, seed=1) for folder in ("a", "b")]
    assert [run.name for run in visualize.load_runs(runs)] == ["a/seed0", "b/seed0"]
    assert [run.name for run in visualize.load_runs([*runs, runs[0]])] == ["a/seed0", "b/seed0", "a/seed0"]
    assert [run.name for run in visualize.load_runs(runs[:1])] == ["seed0"]
    deep = write_run(tmp_path / "c" / "a" / "seed0", steps=3, seed=1)
    assert [run.name for run in visualize.load_runs([runs[0], deep])] == [f"{tmp_path.name}/a/seed0", "c/a/seed0"]


def test_the_report_carries_several_runs_and_stands_alone(run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(visualize, "draw_curves", draw_curves)
    second = write_run(tmp_path / "second", steps=30, seed=1, shown=("hex",))
    assert visualize.main(["--checkpoint_dir", str(run_dir), str(second), "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "out" / n) for n in ("report.html", "report.md", "curves.png")
    ]
    assert png_size(tmp_path / "out" / "curves.png")[0] >= 1200
    page = tmp_path / "out" / "report.html"
    text = page.read_text(encoding="utf-8")
    assert "http" not in text.replace("http-equiv", "")
    assert not any(f"/*{asset}*/" in text for asset in ("data", "style.css", "charts.js", "boards.js", "page.js"))
    data = embedded(page)
    assert [run["name"] for run in data["runs"]] == ["first", "second"]
    assert [len(run["episodes"]) for run in data["runs"]] == [2 * len(SHOWN), 2]
    assert data["runs"][0]["stages"] == [[32, "hard: success 0.81"]]
    score_lines = next(p for p in data["panels"] if p["title"] == "Score")["lines"]
    assert [(line["label"], len(line["x"])) for line in score_lines] == [("first", 80), ("second", 30)]


def test_only_the_metrics_are_needed_and_a_line_being_written_is_left_out(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "score_mean": 0.5, "kl_ref": NaN}\n{"step": 2, "sco')
    assert visualize.main(["--checkpoint_dir", str(tmp_path)]) == 0
    assert embedded(tmp_path / "report.html")["runs"][0]["steps"] == 1
    assert "NaN" not in (tmp_path / "report.html").read_text().split('id="data">')[1].split("</script>")[0]


def test_text_of_a_model_cannot_break_out_of_the_data(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    nasty = {"game": "trace", "turns": [{"seat": 0, "user": "</script><script>alert(1)</script><!--", "answer": "x"}]}
    (tmp_path / "episodes.jsonl").write_text(json.dumps(nasty) + "\n")
    visualize.main(["--checkpoint_dir", str(tmp_path)])
    assert embedded(tmp_path / "report.html")["runs"][0]["episodes"][0]["turns"] == nasty["turns"]


ABOUT = {
    "model": "models/tiny", "games": ["hex", "go"], "opponents": ["random"], "seed": 3, "commit": "abc1234",
    "hardware": "2 CPU cores", "started": "2026-11-22T10:00:00+00:00", "seconds": 3725.0, "versions": {"torch": "2.13"},
    "games_per_step": 8,  # a row may tell of more, where a step played on
}  # fmt: skip


def test_a_run_says_what_it_is_and_what_it_came_to_on_a_page_to_be_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the default settings, from which others differ, are found from anywhere
    run = write_run(tmp_path / "run", steps=9, shown=[])
    (run / "about.json").write_text(json.dumps(ABOUT))
    ppo, stages = {"max_grad_norm": 0.5, "cliprange": 0.2}, [{"name": "long", "games": ["tic_tac_toe"] * 20}]
    (run / "run_config.json").write_text(json.dumps({"ppo": ppo, "curriculum": {"stages": stages}}))
    assert visualize.main(["--run", str(run)]) == 0
    known = dict(embedded(run / "report.html")["runs"][0]["heading"])
    assert known == {"model": "models/tiny", "games": "hex, go", "against": "random", "steps": "9, of 8 games each",
                     "seed": "3", "started": "2026-11-22 10:00 UTC", "commit": "abc1234", "hardware": "2 CPU cores",
                     "time": "1h02m in all, 0m00s in steps"}  # fmt: skip
    text = (run / "report.md").read_text()
    assert text.startswith("# run\n\n|  |  |\n|---|---|\n| model | models/tiny |\n")
    assert "| tic_tac_toe | +0.020 | +0.810 | +0.780 to +0.840 | +0.960 | +0.840 |" in text
    assert "Mean share of the ceiling, 1 of 2 games: 0.840" in text
    assert "![curves](curves.png)" in text
    assert "* `ppo.max_grad_norm: 1.0 -> 0.5`" in text
    assert f"* `curriculum.stages: {json.dumps(stages)}`" in text
    assert "ppo.cliprange" not in text
    assert "torch 2.13" in text


def test_shares_of_sampled_play_are_told_with_their_intervals(tmp_path):
    run = write_run(tmp_path / "run", steps=9, shown=[])
    summary = json.loads((run / "summary.json").read_text())
    summary["games"]["connect_four"] |= {"ceiling": 0.9, "share": 0.67, "share_interval": [0.56, 0.78]}
    summary["games"]["connect_four"] |= {"adjusted": 0.61, "adjusted_interval": [0.52, 0.71]}
    summary["games"]["2048"] = {"after": 0.5, "adjusted": 0.44, "adjusted_interval": 7}  # of a stranger's run
    (run / "summary.json").write_text(json.dumps(summary | {"mean_share_interval": [0.7, 0.81]}))
    assert visualize.main(["--run", str(run)]) == 0
    text = (run / "report.md").read_text()
    assert "| +0.960 | +0.840 | - |" in text
    assert "| +0.610 | +0.520 to +0.710 | +0.900 | +0.670 | +0.560 to +0.780 |" in text
    summary["games"]["connect_four"] |= {"exact_after": 0.6}
    assert "| +0.500 to +0.700 | - | - | +0.600 | +0.900 |" in markdown.results(summary["games"]), "which says more"
    assert "Mean share of the ceiling, 2 of 3 games: 0.840, 95 % interval +0.700 to +0.810" in text
    if shutil.which("node"):
        said = subprocess.run(["node", STUB, run / "report.html"], capture_output=True, text=True, check=True).stdout
        assert 'title=\\"95 % (56 % to 78 %)\\"' in said
        assert '<i class=\\"ends\\" style=\\"left:56.00' in said
        assert "mean share of ceiling (70 % to 81 %)" in said
        assert "<td>0.610, 0.520 to 0.710" in said
        assert "0.440" not in said
        assert said.index("<td>connect_four") < said.index("<td>2048")


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
def test_english_of_several_runs_says_whose_it_is(tmp_path):
    english = {"perplexity_before": 22.0, "perplexity": 21.9, "answers": [["What do bees make?", "Honey.", "Honey."]]}
    for name in ("a", "b"):
        run = write_run(tmp_path / name, steps=9, shown=[])
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(summary | {"english": english}))
    for names in (["a"], ["a", "b"]):
        runs = visualize.load_runs([tmp_path / name for name in names])
        page = visualize.write_report(runs, tmp_path / "report.html")
        said = subprocess.run(["node", STUB, page], capture_output=True, text=True, check=True).stdout
        heads = re.findall("<summary>(.{1,10}): perplexity 22 before", said)
        assert heads == (["English"] if len(names) == 1 else ["a: English", "b: English"])


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
@pytest.mark.parametrize(("past", "shown_of_old"), [(0, 2), (1, 1), (2, 0), (None, 0)])
def test_turns_that_the_model_no_longer_read_are_told_from_those_it_did(tmp_path, past, shown_of_old):
    write_run(run := tmp_path / "run", steps=9, shown=[])
    turn = {"seat": 0, "answer": "0", "action": 0, "legal": {"0": "a"}, "probs": {}}
    turns = [turn | {"user": f"question {i}"} | ({} if past is None else {"past": min(i, past)}) for i in range(3)]
    row = {"step": 1, "game": "trace", "task_id": 0, "outcome": "finished", "history": None, "turns": turns}
    said = drawn_on_the_page(run, [row])
    last = next(m for element, m in reversed(said) if element == "conversation" and "question 2" in m)
    before = last.partition("no longer shown to the model")[0] if "no longer shown" in last else ""
    assert [f"question {i}" in before for i in range(3)] == [i < shown_of_old for i in range(3)]


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
def test_the_page_tells_each_number_and_move_as_what_it_is(tmp_path):
    """Who moved, what was chosen from what, how it ended, and values before and after in columns of their own."""
    write_run(run := tmp_path / "run", steps=9, shown=[])
    turn = {"seat": 1, "system": "s", "user": "u", "answer": "4", "action": 4, "value": 0.25,
            "legal": {"3": "o(1,0)", "4": "o(1,1)"}, "probs": {"3": 0.375, "4": 0.625}}  # fmt: skip
    row = {"step": 1, "game": "tic_tac_toe", "task_id": games.NAMES.index("tic_tac_toe") * games.CONFIGS_PER_GAME,
           "opponent": "mcts:5x1", "score": 1.0, "outcome": "finished", "seat": 1, "returns": [-1, 1],
           "history": [[0, 0], [1, 4]], "turns": [turn]}  # fmt: skip
    said = drawn_on_the_page(run, [row])
    told = {name: " ".join(re.sub("<[^>]*>", " ", text).split()) for name, text in said if text.strip()}
    assert told["moves"] == "mcts:5x1 (0) x(0,0) model (1) o(1,1) end"
    assert told["outcome"] == "won · returns -1 / 1 · the model is Player 1"
    choices = [re.sub("<[^>]*>", " ", text).split() for name, text in said if name == "choice" and "Answer" in text]
    value = "(what the critic expects; 0 is as usual in this game and seat, in standard deviations)"
    chosen = f"Answer: 4 · o(1,1) 62.5 % Value: 0.250 {value} 4 · o(1,1) 62.5 % 3 · o(1,0) 37.5 %"
    assert {" ".join(words) for words in choices} == {chosen}
    assert "connect_four 0.100 0.600 0.500 to 0.700" in told["tables"]


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
def test_a_prompt_that_left_no_room_is_no_illegal_answer(tmp_path):
    write_run(run := tmp_path / "run", steps=9, shown=[])
    turn = {"seat": 0, "user": "Your card: King", "answer": "", "action": None, "legal": {"0": "a"}, "probs": {}}
    row = {"step": 1, "game": "kuhn_poker", "task_id": 0, "outcome": "truncated", "history": None}
    program = turn | {"legal": {}, "answer": "7"}  # which is answered with what it prints, not with an action
    for answered, told, not_told in (
        (turn | {"truncated": True}, "left no room", "not a legal"), (turn, "not a legal", "left no room"),
        (program | {"truncated": True}, "left no room", "not a legal"), (program, ">7<", "not a legal"),
    ):  # fmt: skip
        said = "".join(markup for _, markup in drawn_on_the_page(run, [row | {"turns": [answered]}]))
        assert told in said
        assert not_told not in said


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
@pytest.mark.parametrize("ends", [[-0.9, -0.1], [1.1, 1.4]])
def test_a_sampled_share_beyond_its_bar_is_not_called_exact(tmp_path, ends):
    run = write_run(tmp_path / "run", steps=9, shown=[])
    summary = json.loads((run / "summary.json").read_text())
    summary["games"] = {"leduc_poker": {"after": 0.5, "share": sum(ends) / 2, "share_interval": ends}}
    (run / "summary.json").write_text(json.dumps(summary))
    page = visualize.write_report([visualize.load_run(run)], tmp_path / "report.html")
    said = subprocess.run(["node", STUB, page], capture_output=True, text=True, check=True).stdout
    assert f'title=\\"95 % ({100 * ends[0]:.0f} % to {100 * ends[1]:.0f} %)\\"' in said
    assert 'title=\\"exact' not in said


def test_free_play_and_failed_games_are_told_as_on_the_terminal(tmp_path):
    run = write_run(tmp_path / "run", steps=9, shown=[])
    assert visualize.main(["--run", str(run)]) == 0
    assert not re.search("free play|failed", (run / "report.md").read_text()), "nothing to tell"
    summary = json.loads((run / "summary.json").read_text())
    free = {"free_play_before": {"value": -0.5, "legal_rate": None}, "free_play": {"value": 0.5, "legal_rate": 0.996}}
    summary["games"]["connect_four"] |= free | {"failed": 2}
    (run / "summary.json").write_text(json.dumps(summary))
    assert visualize.main(["--run", str(run)]) == 0
    text = (run / "report.md").read_text()
    assert "| free play before | free play | failed |" in text
    assert "| -0.500, no answers | +0.500, 99.6% legal | 2 |" in text
    other = write_run(tmp_path / "other", steps=9, shown=[])
    pages = [run / "report.html", visualize.write_report(visualize.load_runs([run, other]), tmp_path / "both.html")]
    for page in pages if shutil.which("node") else []:
        said = subprocess.run(["node", STUB, page], capture_output=True, text=True, check=True).stdout
        assert "<td>0.500, 99.6 % legal</td><td>2</td>" in said, page


@pytest.mark.parametrize(("steps", "told"), [(5, False), (9, True)])
def test_a_run_that_went_on_is_not_what_its_earlier_end_was(tmp_path, steps, told):
    run = write_run(tmp_path / "run", steps=9, shown=[])
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"steps": steps}))
    assert visualize.main(["--run", str(run)]) == 0
    text, summary = (run / "report.md").read_text(), embedded(run / "report.html")["runs"][0]["summary"]
    assert ("## Evaluation" in text) == told == ("games" in summary)
    assert ("It has gone on since it was evaluated at step 5." in text) != told
    if shutil.which("node"):
        said = subprocess.run(["node", STUB, run / "report.html"], capture_output=True, text=True, check=True).stdout
        assert ("run: has gone on since it was evaluated at step 5; a run is evaluated at its end." in said) != told
        assert "no summary.json" not in said


def test_a_run_that_went_wrong_shows_it(tmp_path, monkeypatch):
    """Skipped minibatches and alarms are in sight, and no line leads over steps that have no value."""
    run = write_run(tmp_path / "run", steps=2, shown=[])
    rows = [{"step": n, "update_kl": None if 3 <= n <= 5 else n / 10, "skipped": int(3 <= n <= 5)} for n in range(1, 8)]
    rows[3] |= {"alarms": ["kl", "entropy"], "update_kl": 0.4}
    rows[5] |= {"alarms": ["kl"]}
    rows[6] |= {"alarms": "odd"}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = visualize.load_run(run)
    assert dict(visualize.heading(data))["alarms"] == "kl: 2, entropy: 1"
    for odd in (None, 5, [7, None]):
        assert "alarms" not in dict(visualize.heading(dataclasses.replace(data, rows=[{"step": 1, "alarms": odd}])))
    found = {panel["title"]: panel["lines"] for panel in visualize.panels([data])}
    assert found["Minibatches skipped"][0]["y"] == [0, 0, 1, 1, 1, 0, 0]
    drawn: list[str] = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig",
        lambda figure, *_, **__: drawn.extend(
            repr([*map(float, line.get_ydata())]) for a in figure.axes for line in a.lines
        ),
    )
    draw_curves([data], tmp_path / "curves.png")
    assert "[0.1, 0.2, nan, 0.4, nan, 0.6, 0.7]" in drawn
    page = visualize.write_report([data], tmp_path / "page.html")
    assert [p["lines"][0]["y"] for p in embedded(page)["panels"] if p["title"] == "KL"] == [
        [0.1, 0.2, None, 0.4, None, 0.6, 0.7]
    ]


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
def test_a_line_is_broken_where_a_step_has_no_value():
    line = {"x": [1, 2, 3, 4, 5, 6], "y": [0.1, 0.2, None, 0.4, None, 0.6], "colour": 0, "dash": 0, "label": "a"}
    panel = {"lines": [line | {"mean": []}], "stages": []}
    band = {"lines": [line | {"mean": line["y"], "low": line["y"], "high": line["y"]}], "stages": []}
    script = f"""{CHARTS}; const panel = {json.dumps(panel)}, band = {json.dumps(band)}, s = scales(panel);
        console.log(path(panel.lines[0].x, panel.lines[0].y, s)); console.log(extent(panel).join(" "));
        console.log(shown(readout(panel, 3))); console.log(shown(drawLine(band.lines[0], band, s)));
        const marked = shown(drawLine(panel.lines[0], {{...panel, marks: true}}, s));
        console.log(marked.replaceAll("\\n", " ")); console.log(marked.split("<circle").length - 1);
        const high = {{...panel.lines[0], y: [5.1, 5.2, null, 5.4, null, 5.6]}};
        console.log(extent({{...panel, lines: [high]}})[0] > 5);"""
    said = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert re.sub("[-0-9. ]+", "", said[0]) == "MhLhMhMh", "two of one line, and a dot each"
    low, high = map(float, said[1].split())
    assert low == 0
    assert 0.6 < high < 0.7
    assert said[2].startswith("step 3<br>")
    assert said[2].endswith("<b>–</b>")
    assert "NaN" not in said[3]
    assert "null" not in said[3]
    assert "false" not in said[4]
    assert said[5:] == ["4", "true"]


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (1500.4, 1502.2, "1,500.5 1,501 1,501.5 1,502"),
        (1e-6, 1.76e-6, "1.0e-6 1.2e-6 1.4e-6 1.6e-6"),
        (1.2e-4, 1.3e-4, "1.20e-4 1.22e-4 1.24e-4 1.26e-4 1.28e-4 1.30e-4"),
        (0, 2000, "0 500 1,000 1,500 2,000"),
        (100000.1, 100000.6, "100,000.1 100,000.2 100,000.3 100,000.4 100,000.5 100,000.6"),
    ],
)
def test_marks_of_an_axis_are_told_apart_and_true(low, high, labels):
    script = f"""{CHARTS}; const s = {{x0: 1, x1: 9, y0: {low}, y1: {high}, sx: (x) => x, sy: (y) => y}};
        console.log(shown(drawAxes(s, [])));"""
    said = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True).stdout
    assert re.findall(r'text-anchor="end">([^<]*)<', said) == labels.split()


def test_times_beyond_all_time_are_told(tmp_path):
    run = write_run(tmp_path / "run", steps=2, shown=[])
    row = json.dumps({"step": 1, "time_total": 1e308})
    (run / "metrics.jsonl").write_text(f"{row}\n{row}\n")
    (run / "about.json").write_text(json.dumps({"seconds": 1e308}))
    assert dict(visualize.heading(visualize.load_run(run)))["time"] == "277777h46m in all, 277777h46m in steps"
    (run / "about.json").write_text(json.dumps(ABOUT | {"seconds": 3.0}))  # of a run that was killed, and went on
    assert dict(visualize.heading(visualize.load_run(run)))["time"] == "277777h46m in steps"


def test_the_time_of_all_steps_is_told(tmp_path):
    run = write_run(tmp_path / "run", steps=2, shown=[])
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "time_total": 100 * n}) + "\n" for n in (1, 2)))
    assert dict(visualize.heading(visualize.load_run(run)))["time"] == "5m00s in steps"


def test_several_runs_are_told_apart_by_their_dashes(tmp_path):
    runs = [visualize.load_run(write_run(tmp_path / name, steps=9, shown=[])) for name in "ab"]
    scores = next(panel for panel in visualize.panels(runs) if len(panel["lines"]) > 2)["lines"]
    assert len({(line["colour"], line["dash"]) for line in scores}) == len(scores)
    for played, seeds in ((9, 2), (7, 3), (12, 3)):
        rows = [{"step": 1, "score_mean": 0.5, **{f"score/g{k}": 0.5 for k in range(played)}}]
        many = [dataclasses.replace(runs[0], name=str(k), rows=rows) for k in range(seeds)]
        [lines] = [panel["lines"] for panel in visualize.panels(many) if len(panel["lines"]) > 9]
        drawn = {(line["colour"] % len(visualize.PALETTE), line["dash"] % len(visualize.DASHES)) for line in lines}
        assert len(drawn) == len(lines) == played * seeds
    assert (CHARTS.partition("DASHES = [")[2].partition("]")[0]).count('"') == 2 * len(visualize.DASHES)


def test_late_steps_are_not_rounded(tmp_path):
    run = visualize.load_run(write_run(tmp_path / "run", steps=9, shown=[]))
    rows = [{"step": 123456 + k, "score_mean": 0.5} for k in range(3)]
    lines = [line for panel in visualize.panels([dataclasses.replace(run, rows=rows)]) for line in panel["lines"]]
    assert {tuple(line["x"]) for line in lines} == {(123456, 123457, 123458)}


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
def test_the_readout_is_of_the_step_under_the_cursor():
    """A line that ended before, or begins later, has no value there; each run has a stage of its own."""
    line = {"mean": [], "colour": 0, "dash": 0}
    ended = line | {"x": [*range(1, 101)], "y": [0.1] * 100, "label": "a"}
    began = line | {"x": [*range(50, 401)], "y": [0.3] * 351, "label": "b"}
    panel = {"lines": [ended, began], "stages": [[1, "easy", "a: "], [250, "hard", "a: "], [60, "late", "b: "]]}
    script = f"{CHARTS}; for (const x of [10.2, 300]) console.log(shown(readout({json.dumps(panel)}, x)))"
    said = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True).stdout
    early, late = (" ".join(re.sub("<[^>]*>", " ", text).split()) for text in said.splitlines())
    assert early == "step 10 · a: easy a 0.1 b –"
    assert late == "step 300 · a: hard · b: late a – b 0.3"


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
@pytest.mark.parametrize(("steps", "shown"), [([250], "250"), ([250, 500], "250 400"), ([1, 9000], "100 250 400 800")])
def test_stages_outside_of_a_chart_are_not_drawn_within_it(steps, shown):
    """That of step 100 stood on the marks of the ordinate, and where a run had one evaluation, at its point."""
    panel = {"lines": [{"x": steps, "y": [0.1] * len(steps), "mean": []}]}
    stages = [[step, f"at {step}"] for step in (100, 250, 400, 800)]
    script = f"{CHARTS}; console.log(shown(drawAxes(scales({json.dumps(panel)}), {json.dumps(stages)})))"
    said = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True).stdout
    assert " ".join(re.findall(r"<title>at (\d+)", said)) == shown


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
def test_who_gained_from_two_others_has_won():
    """In three-player leduc_poker, of -13 to 26 chips, a gain of two is a score of 0.38, and was called lost."""
    games = [(15 / 39, [2, -1, -1]), (12 / 39, [-1, 2, -1]), (13 / 39, [0, 0, 0]), (1.0, [5, -5]), (0.5, [0, 0]),
             (2 / 3, [26, 12, 20, 30]), (0.2, [640])]  # fmt: skip
    rows = [{"outcome": "finished", "seat": 0, "score": score, "returns": returns} for score, returns in games]
    source = (ROOT / "scripts" / "report" / "page.js").read_text()
    script = "function verdict" + source.partition("function verdict")[2].partition("\n}\n")[0] + "\n}\n"
    script += f"console.log({json.dumps(rows)}.map((row) => verdict(row)[0]).join(' '))"
    said = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["won", "lost", "drawn", "won", "drawn", "won", "lost"]


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
def test_nearly_all_is_not_all():
    source = (ROOT / "scripts" / "report" / "page.js").read_text()
    lines = [line for line in source.splitlines() if line.startswith(("const percent", "const freely", "const number"))]
    script = [
        "const html = 0",
        *lines,
        "console.log(freely({value: 0.5, legal_rate: 0.996}), '|', percent(1), percent())",
        "console.log(freely({value: 0.5, legal_rate: null}))",
    ]
    said = subprocess.run(["node", "-e", "\n".join(script)], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["0.500, 99.6 % legal | 100 % –", "0.500, no answers"]


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
def test_steps_too_large_to_count_on_from_have_marks_all_the_same():
    script = f"{CHARTS}; console.log(ticks({2**60}, {2**60 + 256}, 5).length < 30, ticks(0, 10, 5).join(' '))"
    said = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True, timeout=5).stdout
    assert said == "true 0 2 4 6 8 10\n"


def test_names_and_their_number_are_bounded(tmp_path):
    """Charts of longer or of more ones take minutes, or never end."""
    games = {"score/" + "a" * 10**5: 1.0} | {f"score/b{n}": 1.0 for n in range(1500)}
    rows = [{"step": n, "stage_change": "s" * 10**5, "stage_reason": "r" * 10**5} | games for n in (1, 2)]
    rows += [{"step": n, "stage_change": "s" * 41, "stage_reason": "r" * 201} for n in range(3, 1500)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = visualize.load_run(tmp_path)
    lines = visualize.panels([run])[0]["lines"]
    assert len(lines) == visualize.MAX_LINES
    assert max(len(line["label"]) for line in lines) == visualize.MAX_NAME
    assert lines[0]["label"] == f"{'a' * 20}…{'a' * 19}"
    assert [step for step, _ in run.stages] == [*range(1400, 1500)]
    assert {text.count("…") for _, text in run.stages} == {2}
    assert max(len(text) for _, text in run.stages) == 6 * visualize.MAX_NAME + 2


def test_the_exact_value_of_a_page_is_the_one_after_training():
    games = {"hex": {"before": 0.1, "after": 0.2, "exact_before": 0.125, "exact_after": 0.25}}
    head, _, row = markdown.results(games).splitlines()
    assert dict(zip(head.split("|"), row.split("|"), strict=True))[" exact "] == " +0.250 "


def test_a_run_from_before_about_json_still_says_what_it_can(tmp_path):
    run = visualize.load_run(write_run(tmp_path / "run", steps=9, shown=[]))
    assert dict(visualize.heading(run)) == {"model": "tiny", "games": "tic_tac_toe, leduc_poker",
                                            "against": "random, mcts:50x1", "steps": "9, of 16 games each"}  # fmt: skip


def test_programs_are_against_nobody(tmp_path):
    (write_run(tmp_path / "run", steps=9, shown=[]) / "about.json").write_text(json.dumps({"opponents": []}))
    assert "against" not in dict(visualize.heading(visualize.load_run(tmp_path / "run")))


def test_odd_numbers_of_a_summary_are_no_numbers():
    deep = [[0.5]]
    for _ in range(600):
        deep = [deep]
    text = markdown.page("run", [], {}, {"games": {"hex": {"after": 10**400, "interval": deep}}}, {})
    assert [line for line in text.splitlines() if line.startswith("| hex")] == ["| hex | - | - |"]


def test_numbers_that_cannot_be_drawn_are_told_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(visualize, "draw_curves", draw_curves)
    rows = [{"step": step, "score_mean": x} for step, x in ((1, 1e308), (2, -1e308), (3, 1e308))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert visualize.main(["--run", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: no curves.png: ")
    assert (tmp_path / "report.md").exists()


def test_a_run_of_endless_opponents_shows_those_that_it_met_most(tmp_path):
    run = write_run(tmp_path / "run", steps=5)
    lines = [{"step": i, "opponents": {f"o{i}": 1, "random": 2}} for i in range(1, 600)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = visualize.load_run(run).rows
    named = {key for row in rows for key in row if key.startswith("opponent/")}
    assert len(named) == visualize.MAX_LINES
    assert rows[-1]["opponent/random"] == pytest.approx(2 / 3)


def test_what_is_nested_deeper_than_can_be_drawn_is_one_line(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=5)
    (run / "episodes.jsonl").write_text('{"a": ' + "[" * 500 + "]" * 500 + "}\n")
    assert visualize.main(["--run", str(run)]) == 2
    assert "episodes.jsonl: cannot be read after line 1: nested too deeply" in capsys.readouterr().err


def test_a_lock_that_is_a_pipe_is_not_waited_for(tmp_path):
    run = write_run(tmp_path / "run", steps=5)
    (run / "summary.json").unlink()
    os.mkfifo(run / ".lock")
    assert visualize._ended(run)


def test_text_of_others_links_to_nothing_in_the_pasted_page():
    evil = "![x](http://127.0.0.1/seen) [y](javascript:z)"
    text = markdown.page(evil, [("model", evil)], {evil: evil}, {"games": {evil: {"after": 0.5, "interval": evil}}}, {})
    assert [line for line in text.splitlines() if "[" in line] == [markdown.BOARDS, "![curves](curves.png)"]
    assert markdown.page("run", [], {}, {}, {"env": {"x": ["<2>"]}}).count("`env.x: null -> ['<2>']`") == 1
    for bare in ("https://evil.example", "www.evil.example", "@octocat", "me@evil.example"):  # links by themselves
        assert bare not in markdown.page(bare, [("model", bare)], {}, {}, {})


def test_text_of_others_cannot_break_the_pasted_page():
    evil = "a | b\n# c `d` <script>"
    text = markdown.page(evil, [("model", evil)], {evil: evil}, {"games": {evil: {"after": 0.5, "interval": evil}}}, {})
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# a / b # c `d` &lt;script>", "## Evaluation", "## Curves", "## Versions",
    ]  # fmt: skip
    assert {line.count("|") for line in text.splitlines() if "a / b" in line and line.startswith("|")} == {3, 4}


def test_a_page_that_follows_a_run_until_its_summary_is_there(tmp_path, monkeypatch, capsys):
    write_run(run := tmp_path / "run", steps=9, shown=[])
    summary = (run / "summary.json").read_text()
    (run / "summary.json").unlink()
    seen = []

    def sleep(seconds):
        page = (run / "report.html").read_text()
        again = '<meta http-equiv="refresh" content="5">' in page and embedded(run / "report.html")["seen"] != ""
        seen.append((seconds, again, embedded(run / "report.html")))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 9 + len(seen), "score_mean": 0.5}) + "\n")
        if len(seen) == 2:  # which is what tells the end of a copy, which has no lock
            (run / "summary.json").write_text(summary)

    monkeypatch.setattr(visualize.time, "sleep", sleep)
    assert visualize.main(["--run", str(run), "--watch", "5"]) == 0
    assert [(seconds, again, data["runs"][0]["steps"]) for seconds, again, data in seen] == [
        (5, True, 9),
        (5, True, 10),
    ]
    assert embedded(run / "report.html")["runs"][0]["steps"] == 11
    assert 'http-equiv="refresh"' not in (run / "report.html").read_text()
    assert embedded(run / "report.html")["seen"] == ""
    with lock_run(run):
        assert not visualize._ended(run), "its games are recorded after its summary"
    assert visualize._ended(run)
    (run / ".lock").unlink()
    os.utime(run / "summary.json", (1, 1))
    assert not visualize._ended(run), "a copy of a run that was gone on with, and has its summary of before"
    assert capsys.readouterr().out.split() == [
        str(run / n) for n in ("report.html", "report.html", "report.md", "curves.png")
    ]


def test_a_copy_that_gets_more_steps_is_followed_from_before_the_first_of_them_on(tmp_path):
    write_run(run := tmp_path / "run", steps=9, shown=[])
    os.utime(run / "metrics.jsonl", (1, 1))
    assert visualize._ended(run)
    MetricsLog(run / "metrics.jsonl").truncate_to(9)  # as a resumed run begins
    assert not visualize._ended(run)


def test_a_page_that_is_no_longer_written_does_not_say_that_it_follows(tmp_path, monkeypatch):
    write_run(run := tmp_path / "run", steps=9, shown=[])

    def interrupt(_):
        assert 'http-equiv="refresh"' in (run / "report.html").read_text()
        raise KeyboardInterrupt

    monkeypatch.setattr(visualize.time, "sleep", interrupt)
    with lock_run(run):
        assert visualize.main(["--run", str(run), "--watch"]) == 130
    assert 'http-equiv="refresh"' not in (run / "report.html").read_text()


def test_a_run_is_followed_from_before_its_first_step_on(tmp_path, monkeypatch):
    write_run(run := tmp_path / "run", steps=9, shown=[])
    lines, summary = (run / "metrics.jsonl").read_text(), (run / "summary.json").read_text()
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").write_text("")  # as it is while the first evaluation plays

    def sleep(_):
        assert not (run / "report.html").exists()
        (run / "metrics.jsonl").write_text(lines)
        (run / "summary.json").write_text(summary)

    monkeypatch.setattr(visualize.time, "sleep", sleep)
    assert visualize.main(["--run", str(run), "--watch"]) == 0
    assert embedded(run / "report.html")["runs"][0]["steps"] == 9


def test_a_run_that_was_cut_short_is_followed_to_there(tmp_path, monkeypatch):
    write_run(run := tmp_path / "run", steps=9, shown=[])
    (run / "summary.json").unlink()
    with lock_run(run):
        assert not visualize._ended(run)
    monkeypatch.setattr(visualize.time, "sleep", lambda _: pytest.fail("nobody is at it any more"))
    assert visualize.main(["--run", str(run), "--watch"]) == 0
    assert embedded(run / "report.html")["runs"][0]["steps"] == 9


def test_names_are_no_formulas(tmp_path):
    for name in ("lr$5$x", "b$_$"):
        write_run(tmp_path / name, steps=9, shown=[])
    runs = [str(tmp_path / name) for name in ("lr$5$x", "b$_$")]
    assert visualize.main(["--run", *runs, "--output", str(tmp_path / "both")]) == 0


def test_a_run_that_is_not_there_cannot_be_followed(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    for name in ("none", "runs"):
        assert visualize.main(["--run", str(tmp_path / name), "--watch"]) == 2
        assert capsys.readouterr().err == f"error: {tmp_path}/{name}: there is no such run\n"


class Tags(HTMLParser):
    """The tags of markup, and the attributes that run something."""

    def __init__(self, markup):
        super().__init__()
        self.tags, self.handlers = set(), []
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.handlers += [name for name, value in attrs if name.startswith("on") or "javascript:" in (value or "")]


DRAWN = {
    "b", "br", "circle", "details", "div", "g", "h3", "i", "li", "line", "option", "p", "path", "pre", "rect", "small",
    "span", "summary", "svg", "table", "tbody", "td", "text", "th", "thead", "title", "tr",
}  # fmt: skip
STUB = ROOT / "tests" / "helpers" / "page_stub.js"
CHARTS = (ROOT / "scripts" / "report" / "charts.js").read_text()
BOARDS = (ROOT / "scripts" / "report" / "boards.js").read_text()
EVIL = "<img src=x onerror=alert(1)>\u202e"
STATES = [  # of the boards that take words out of a position, and of all others
    f"Cards (public player_0 player_1): 0 1 2\nMoney (player_0 player_1): {EVIL}\n"
    f"Pot: {EVIL}\nRound 1 sequence: {EVIL}",
    "\n".join(["2 <svg/onload=alert(1)> 2 2"] * 4), f"P0 hand: {EVIL}\nPoint card sequence: {EVIL}\n{EVIL}: 1 {EVIL}",
    "<svg/onload=alert(1)> <svg/onload=alert(1)> <b/onclick=x>", "\n".join([EVIL] * 8),
    f" 1 {EVIL} x x\"><script>alert(1)</script>",
    "constructor __proto__ toString", "", "<>", "'\" onload='x", f"8/{EVIL}/8", f" 1 +XO\n{EVIL}",
]  # fmt: skip


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
def test_what_others_wrote_is_drawn_as_text(tmp_path, monkeypatch):
    """Every text and number that a server, a model or a damaged file may give, in the markup of every element."""

    def episode(game, state, before):
        said = dict.fromkeys(("seat", "user", "answer", "system", "action", "value"), EVIL)
        said |= {"legal": {"1": EVIL, EVIL: 1}, "probs": {"1": EVIL, EVIL: 0.5}}
        about = dict.fromkeys(("step", "seed", "opponent", "score", "outcome", "seat"), EVIL)
        turns = [said | {"state": text} for text in (before, state)]
        return about | {"game": game, "task_id": 0, "returns": [EVIL, None, {}], "turns": turns}

    games = [
        *re.findall(r"(\w+)(?::|,|\n)", BOARDS.partition("const BOARDS = {")[2].partition("};")[0]),
        EVIL,
        "constructor",
    ]
    assert {"leduc_poker", "2048", "hex_small", "liars_dice", "chess"} <= set(games)
    pairs = list(zip(STATES, STATES[1:] + STATES[:1], strict=True))
    rows = [episode(game, *pair) for game in games for pair in pairs]
    measured = dict.fromkeys(("before", "after", "interval", "ceiling", "share", "exact"), EVIL)
    write_run(run := tmp_path / "run", steps=9, shown=[])
    files = {"episodes.jsonl": "\n".join(map(json.dumps, rows)), "run_config.json": json.dumps({EVIL: EVIL}),
             "summary.json": json.dumps({"games": {EVIL: measured}, "mean_share_of_ceiling": 0.5})}  # fmt: skip
    for name, text in files.items():
        (run / name).write_text(text)
    monkeypatch.setattr(visualize, "MAX_EPISODES", len(rows))
    page = visualize.write_report([visualize.load_run(run)], tmp_path / "report.html")
    said = subprocess.run(["node", STUB, page], capture_output=True, text=True, check=True).stdout
    drawn = [(element, Tags(markup)) for element, markup in json.loads(said)]
    assert len(drawn) > len(games) * len(STATES)
    assert {element for element, tags in drawn if tags.handlers} == set()
    assert set().union(*(tags.tags for _, tags in drawn)) <= DRAWN
    assert EVIL.replace("<", "&#60;").replace(">", "&#62;").replace("\u202e", "\ufffd") in said
    assert "\u202e" not in said, "it would turn around what follows it, such as a number"
    assert "mean share of ceiling, 0 of 1 games" in said


# Moves in a game's first configuration, and what is drawn of them: whose piece in which column and row, or words.
DRAWN_AS = [
    ("tic_tac_toe", [1, 5], "0@1,0 1@2,1"), ("phantom_ttt", [1, 5], "0@1,0 1@2,1"),
    ("connect_four", [1, 5], "0@1,5 1@5,5"), ("othello", [19], "0@3,2 0@3,3 0@4,3 0@3,4 1@4,4"),
    ("go", [1, 5], "1@0,3 0@1,4"), ("hex_small", [1, 5], "0@1,0 1@3,1"), ("clobber", [], "0@0,0 1@1,0 0@2,0"),
    ("checkers", [], "1@1,0 1@3,0 1@5,0 1@7,0 1@0,1 1@2,1 1@4,1 1@6,1 1@1,2 1@3,2 1@5,2 1@7,2 0@0,5 0@2,5"),
    ("amazons", [], "1@1,0 1@4,0 1@0,1 1@5,1 0@0,4"),
    ("chess", [], "#16181b ♜ #16181b ♞"),
    ("kuhn_poker", [0, 2, 0, 1], "Player 0 J Player 1 K Betting Player 0: pass · Player 1: bet"),
    ("leduc_poker", [4, 1, 1, 1, 2, 2],
     "Public Q♠ Player 0 K♠ money 95 Player 1 J♥ money 99 Pot 6 Round 1 Call · Call Round 2 Raise"),
    ("goofspiel_small", [[2, 1]], "Player 0 hand 1 2 4 Player 1 hand 1 3 4 Player 0 played 3 Player 1 played 2"),
    ("liars_dice_small", [1, 4, 0, 6], "Player 0 ⚁ Player 1 ⚄ Bids Player 0: 1 × 1 · Player 1: 2 × 1"),
]  # fmt: skip


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
def test_a_position_is_drawn_as_it_is():
    """No stone of the other player or in another place, no other card: the engine's text is not beside the picture."""
    states = []
    for name, moves, _ in DRAWN_AS:
        state = load_game(games.NAMES.index(name) * games.CONFIGS_PER_GAME).new_initial_state()
        for move in moves:
            (state.apply_actions if isinstance(move, list) else state.apply_action)(move)
        states.append([name, str(state)])
    script = f"{CHARTS}; {BOARDS}; for (const s of {json.dumps(states)}) console.log(shown(drawPosition(...s, null))"
    script += r".replaceAll('\n', ' '))"
    said = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True).stdout.splitlines()
    piece = re.compile(r'<(?:circle cx="|path d="M)([\d.]+)"? (?:cy=")?([\d.]+)[^>]*?var\(--(?:p|stone)(\d)\)')
    for (name, _, expected), picture in zip(DRAWN_AS, said, strict=True):
        placed = [f"{player}@{float(x) // 44:.0f},{float(y) // 44:.0f}" for x, y, player in piece.findall(picture)]
        men = re.findall(r"fill:(#\w+);stroke:[^>]*>(.)", picture)
        told = placed or [*itertools.chain(*men)] or re.sub("<[^>]*>", " ", picture).split()
        assert " ".join(told).startswith(expected), name


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
@pytest.mark.parametrize(("game", "state", "bids"), [
    ("liars_dice_small", "-1 -1 - chance node, current roller is player 0", "–"),
    ("liars_dice", "25523 5-1-1-1-1 - chance node, current roller is player 1", "–"),
    ("liars_dice", "25523 51423 2-5 3-5 Liar", "Player 0: 2 × 5 · Player 1: 3 × 5 · Player 0: Liar"),
])  # fmt: skip
def test_only_bids_are_drawn_as_bids(tmp_path, game, state, bids):
    write_run(run := tmp_path / "run", steps=9, shown=[])
    turn = {"seat": 0, "user": "", "answer": "0", "action": 0, "value": 0.0, "legal": {"0": "a"}, "probs": {"0": 1.0}}
    row = {"step": 1, "game": game, "task_id": 0, "seed": 0, "opponent": "random", "score": 1.0, "outcome": "finished",
           "seat": 0, "returns": [1, -1], "turns": [turn | {"system": "", "state": state}]}  # fmt: skip
    spans = re.compile(r'<span class="text">(.*?)</span>')
    [drawn] = {text for _, markup in drawn_on_the_page(run, [row]) for text in spans.findall(markup)}
    assert drawn == bids


@pytest.mark.skipif(not shutil.which("node"), reason="no Node here")
@pytest.mark.parametrize("name", ["kuhn_poker", "leduc_poker"])
def test_hands_of_three_are_not_drawn_as_those_of_two(name):
    """A game of one's own may take a built-in one's name: all cards of three in leduc_poker were jacks of spades."""
    source = (ROOT / "scripts" / "report" / "boards.js").read_text()
    for players in (2, 3):
        state = pyspiel.load_game(f"{name}(players={players})").new_initial_state()
        for action in (*range(players), 1, 1):  # cards, then bets
            state.apply_action(action)
        script = f"{CHARTS}; {source}; console.log(shown(drawPosition({json.dumps([name, str(state)])[1:-1]})))"
        said = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True).stdout
        assert said.startswith("<pre>") == (players == 3)


def test_no_script_but_the_pages_own_may_run(tmp_path):
    write_run(run := tmp_path / "run", steps=9, shown=[])
    page = visualize.write_report([visualize.load_run(run)], tmp_path / "report.html").read_text()
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
    policy += "form-action 'none'"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in page
    assert page.index("Content-Security-Policy") < page.index("<style>")
    assert script.count("innerHTML") == 1  # in put, which takes what html`...` has made
    assert re.findall(r"outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "metrics.jsonl: not found; a run directory has a metrics.jsonl, written by training\n"),
        ({"metrics.jsonl": ""}, "metrics.jsonl: expected at least one step"),
        ({"metrics.jsonl": '{"step": 1}\n{"step"\n'}, "metrics.jsonl: cannot be read after line 1: Expecting"),
        ({"metrics.jsonl": '{"step": 1}\n[]\n'}, "metrics.jsonl: cannot be read after line 2: not a JSON object"),
        ({"metrics.jsonl": '{"stage": "easy"}\n'}, "metrics.jsonl: expected at least one step, and a number"),
        ({"metrics.jsonl": b"\xff\xfe\n"}, "metrics.jsonl: cannot be read after"),
        ({"summary.json": "{"}, "summary.json: invalid JSON"),
        ({"summary.json": '{"games": []}'}, "summary.json: games must be an object"),
        ({"summary.json": '{"games": {"hex": 1}}'}, "summary.json: games must be an object of one object a game"),
        ({"summary.json": '{"english": [1]}'}, "summary.json: english must be an object, its answers a list of lists"),
        ({"summary.json": '{"english": {"answers": [3]}}'}, "summary.json: english must be an object, its answers a"),
        ({"run_config.json": "3"}, "run_config.json: not a JSON object"),
        ({"episodes.jsonl": '{"game": "hex", "turns": [1]}\n'}, "hex at step None: its turns must be a list"),
        ({"episodes.jsonl": '{"game": "hex", "turns": 1}\n'}, "hex at step None: its turns must be a list"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path, capsys, files, message):
    defaults = {} if not files else {"metrics.jsonl": '{"step": 1}\n'}
    for name, content in (defaults | files).items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert visualize.main(["--checkpoint_dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


# --- Browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("no Chromium here (looked for chromium, chromium-browser and google-chrome)")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def report(run_dir):
    visualize.main(["--checkpoint_dir", str(run_dir)])
    return run_dir / "report.html"


@pytest.fixture
def page(browser, report):
    browser.problems.clear()
    browser.open(report)
    yield browser
    assert not browser.problems, browser.problems


def where(page):
    return page.js("document.getElementById('where').textContent")


def test_replay_steps_by_button_and_by_keyboard(page, run_dir):
    page.choose("#pick-game", "tic_tac_toe")
    total = len(replayable(json.loads((run_dir / "episodes.jsonl").read_text().split("\n")[0]))["frames"])
    pictures = [page.js("document.getElementById('board').innerHTML")]
    assert where(page) == f"1 / {total}"
    page.click("#next")
    pictures.append(page.js("document.getElementById('board').innerHTML"))
    page.press("ArrowRight")
    pictures.append(page.js("document.getElementById('board').innerHTML"))
    assert where(page) == f"3 / {total}"
    assert len(set(pictures)) == 3
    page.press("ArrowLeft")
    assert where(page) == f"2 / {total}"
    assert page.js("document.getElementById('board').innerHTML") == pictures[1]
    page.press("End")
    assert where(page) == f"{total} / {total}"
    page.press("ArrowRight")
    assert where(page) == f"{total} / {total}"
    page.click("#back")
    assert where(page) == f"{total - 1} / {total}"
    page.click("#first")
    assert where(page) == f"1 / {total}"


ALIKE = ("chess", "go", "clobber", "othello", "checkers", "amazons")  # drawn as that of connect_four is


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ALIKE)) for n in SHOWN])
def test_positions_are_drawn(page, name):
    page.choose("#pick-game", name)
    picture = "document.querySelector('#board svg, #board .cards') !== null"
    drawn = page.js(
        "view.episode.frames.map((f, i) => i).filter((i) => i < 12 || i % 11 === 0)"
        f".map((i) => {{ show(i); return {picture}; }})"
    )
    assert len(drawn) > 2
    assert len(set(drawn)) == 1
    assert drawn[0] is (name not in AS_TEXT)


def test_a_decision_shows_bars_and_the_conversation(page):
    page.choose("#pick-game", "tic_tac_toe")
    page.js("show(view.episode.frames.findIndex((f) => f.turns.length))")
    turn = page.js("view.episode.turns[0]")
    bars = page.js("[...document.querySelectorAll('.choice .p')].map((e) => parseFloat(e.textContent))")
    taken = turn["probs"][str(turn["action"])]
    assert len(bars) == len(turn["legal"])
    assert sum(bars) == pytest.approx(100, abs=0.5)
    assert bars == sorted(bars, reverse=True)
    answer = page.js("document.querySelector('#choice .note').textContent")
    assert answer == f"Answer: {turn['action']} · {turn['legal'][str(turn['action'])]} {100 * taken:.1f} %"
    said = page.js("[...document.querySelectorAll('.said pre')].map((e) => e.textContent)")
    assert said == [turn["system"], turn["user"], turn["answer"]]


def test_names_that_begin_with_their_number_are_said_once(page):
    page.choose("#pick-game", "backgammon")
    page.js("show(view.episode.frames.findIndex((f) => f.turns.length))")
    action, name = page.js("(() => { const t = view.episode.turns[0]; return [t.action, t.legal[t.action]]; })()")
    assert name.startswith(f"{action} - ")
    said = page.js("document.querySelector('#choice .note b').textContent")
    assert said == name.replace(" - ", " · ", 1)


def test_theme_follows_the_system_and_the_button(page, report):
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.js(colour)
    page.open(report, scheme="dark")
    dark = page.js(colour)
    assert light != dark
    page.click("#theme")
    assert page.js(colour) == light


def test_what_is_printed_is_dark_on_white():
    """Browsers print the letters of a dark page and leave its ground white."""
    before, _, _ = (ROOT / "scripts" / "report" / "style.css").read_text().partition("color-scheme: dark;")
    assert re.search(r"@media screen \{[^{}]*\{\s*$", before)


def test_every_panel_is_drawn_and_answers_to_the_mouse(page, report):
    titles = [panel["title"] for panel in embedded(report)["panels"]]
    assert page.js("[...document.querySelectorAll('.chart svg[role=img]')].map((e) => e.ariaLabel)") == titles
    assert page.js("document.querySelector('.chart svg').innerHTML.includes('NaN')") is False
    x, y = page.js(
        "(() => { const e = document.querySelector('.chart svg'); e.scrollIntoView({block: 'center'});"
        "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert "step 36" in page.js("document.querySelector('.tip').textContent")
    assert page.js("document.querySelector('.tip').offsetHeight") < 100  # its swatches are not as wide as the chart


def test_what_matters_is_in_sight_and_the_rest_is_folded(page):
    shown = "[...document.querySelectorAll('%s .chart svg[role=img]')].map((e) => e.ariaLabel)"
    first = ["Score by game", "Success", "Evaluation", "Entropy", "KL", "Explained variance"]
    assert page.js(shown % "#charts") == first
    others = page.js(shown % "#others")
    assert "Learning rate" in others
    assert page.js("document.getElementById('more').textContent") == f"{len(others)} more charts"
    assert page.js("document.getElementById('others').checkVisibility()") is False


def test_a_run_that_goes_on_says_how_far_it_is_and_self_play_what_it_is_worth(page, tmp_path):
    run = write_run(tmp_path / "run", steps=9, shown=[])
    rows = [{"step": s, "success_rate": 0.25, "window_success": None, "memory_mb": 497.2 + s / 100} for s in (8, 9)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "about.json").write_text(json.dumps(ABOUT | {"steps": 40}))
    (run / "summary.json").write_text(json.dumps({"games": {"leduc_poker": {"after": 0.1, "nash_conv": 4.186}}}))
    page.open(visualize.write_report([visualize.load_run(run)], run / "report.html", 60))
    tiles = page.js("[...document.querySelectorAll('.tile')].map((e) => e.textContent)")
    assert tiles == ["9of 40 steps", "4.19NashConv", "25 %success, last step"]
    assert re.fullmatch(r"run · going on, as of \d\d:\d\d:\d\d", page.js("document.querySelector('h1').textContent"))
    chart = "document.querySelector('[aria-label=Memory]').querySelectorAll('[text-anchor=end]')"
    ticks = page.js(f"[...{chart}].map((e) => e.textContent)")
    assert len(set(ticks)) == len(ticks) > 2


@pytest.fixture(scope="module")
def compared(run_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    second = write_run(folder / "second", steps=30, seed=1, shown=("hex",))
    summary = json.loads((second / "summary.json").read_text())
    summary["games"]["tic_tac_toe"] |= {"exact_after": 0.8, "free_play": {"value": 0.5, "legal_rate": 1}, "failed": 2}
    (second / "summary.json").write_text(json.dumps(summary))
    visualize.main(["--run", str(run_dir), str(second), "--output", str(folder)])
    return folder / "report.html"


def test_runs_are_compared_side_by_side_and_by_what_differs(page, compared):
    page.open(compared)
    table = "[...document.querySelectorAll('#tables tr')].map((r) => [...r.children].map((c) => c.textContent))"
    after = ["After", "95 % interval", "Exact value", "Share of ceiling", "Free play", "Failed"]
    assert page.js(table)[:3] == [
        ["", "first", "second"],
        ["Game", *after, *after],
        ["tic_tac_toe", "0.810", "0.780 to 0.840", "–", "\u200784 %", "–", "–",
         "0.810", "0.780 to 0.840", "0.800", "\u200784 %", "0.500, 100.0 % legal", "2"],
    ]  # fmt: skip
    settings = "[...document.querySelectorAll('#config tbody tr')].map((r) => r.textContent)"
    assert page.js(settings) == ["ppo.learning_rate0.0030.006"]
    assert page.js("document.querySelector('#config summary').textContent") == "1 settings differ, 3 are the same"


def test_each_game_has_its_own_nash_conv(page, tmp_path):
    """Games have stakes of their own: a mean over them is a mean of nothing."""
    run = write_run(tmp_path / "run", steps=3, shown=[])
    games_played = {"leduc_poker": {"nash_conv": 4.0}, "kuhn_poker": {"nash_conv": 0.5}}
    (run / "summary.json").write_text(json.dumps({"games": games_played}))
    page.open(visualize.write_report([visualize.load_run(run)], run / "report.html"))
    tiles = page.js("[...document.querySelectorAll('.tile')].map((e) => e.textContent)")
    assert {"4NashConv, leduc_poker", "0.5NashConv, kuhn_poker"} <= set(tiles)


def test_a_long_curve_ends_where_the_run_does_and_keeps_what_is_rare(tmp_path):
    run = write_run(tmp_path / "run", shown=[])
    rows = [{"step": s, "score_mean": s / 10_000, "failed": int(s == 3500)} for s in range(1, 4001)]
    rows += [{"step": s, "score_mean": 0.9, "retries": int(s == 5001)} for s in range(4001, 5003)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [line for panel in visualize.panels([visualize.load_run(run)]) for line in panel["lines"]]
    tops = {line["label"]: max(line["y"]) for line in lines}
    assert (tops["failed"], tops["retries"]) == (1, 1)
    assert max(len(line["x"]) for line in lines) <= visualize.MAX_POINTS + 1
    rows = [{"step": s, "kl_ref": 99.0 if s == 3500 else None if s % 3 else 0.1} for s in range(1, 5001)]
    [kl] = visualize.panel_lines(visualize.Panel("KL", ("kl_ref",)), [visualize.RunData("r", rows, {}, {}, [], {})])
    known = [value for value in kl["y"] if value == value]
    assert (max(known), min(known)) == (99.0, 0.1), "beside a gap, too"
    assert len(known) + 100 < len(kl["y"]) <= 1.5 * visualize.MAX_POINTS + 1
    [score] = [line for line in lines if line["label"] == "score_mean"]
    assert (score["x"][-1], score["y"][-1], len(score["x"]) <= visualize.MAX_POINTS) == (5002, 0.9, True)


@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_is_wider_than_the_screen(page, report, compared, width):
    for path in (report, compared):
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600
        )
        page.open(path)
        assert page.js("document.documentElement.scrollWidth") == width
    page.call("Emulation.clearDeviceMetricsOverride")


@pytest.mark.parametrize(("kind", "against"), [("trace", False), ("openspiel", True)])
def test_the_pasted_page_says_against_whom_where_there_is_somebody(kind, against):
    text = markdown.page("run", [], {}, {"games": {"a": {"after": 0.5}}}, {"env": {"env_type": kind}})
    assert ("against uniform random" in text) == against
