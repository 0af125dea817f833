"""env.games_path: users' own games, the page that explains them, one line for a bad file, and runs that keep theirs."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from serving import running_server
from tiny import micro_file
from tiny_runs import rows, train

import games
import train_ppo
from config.reader import make, read_json
from envs import exact, openspiel
from envs.config import EnvConfig
from envs.contract import ContractError, check_game, check_own_games
from envs.openspiel import table
from envs.opponents import RandomBot, make_bot, parse_opponent
from scripts import evaluate, merge, play, visualize
from training.config import parse_args, read_config
from utils import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding_a_game.md").read_text()
EXAMPLES = re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
NIM = dict(EXAMPLES)["nim.py"]

PROGRAM = """
import json, sys
import games
from config.reader import make
from env_wrapper import Action, EnvConfig, Task, check_games, play

class First:
    def act(self, queries):
        self.system = queries[0].conversation[0]["content"]
        return [Action(str(min(query.legal))) for query in queries]

try:
    config = make(EnvConfig, {"games_path": sys.argv[1]}, "env")
    check_games()
except ValueError as error:
    sys.exit(f"refused: {error}")
player, played = First(), []
for name in sys.argv[2:]:
    [episode] = play(config, player, [Task(games.NAMES.index(name) * games.CONFIGS_PER_GAME + 2, 0, "mcts:5x1")])
    played.append([name, games.NAMES.index(name), episode.outcome, player.system, episode.info])
print(json.dumps({"names": games.NAMES, "played": played}))
"""


def run(folder, *names):
    command = [sys.executable, "-c", PROGRAM, folder, *names]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_the_pages_examples_run(tmp_path):
    assert [name for name, _ in EXAMPLES] == ["nim.py", "my_tic_tac_toe.py"]
    write(tmp_path, **{name.removesuffix(".py"): text for name, text in EXAMPLES})
    result = run(tmp_path, "nim", "tic_tac_toe", "kuhn_poker")
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["names"] == [*games.NAMES, "nim"]
    (nim, tic_tac_toe, kuhn) = told["played"]
    assert nim[:3] == ["nim", 28, "finished"]
    assert "piles of 2, 3, 4, 5 tokens" in nim[3]
    assert tic_tac_toe[:3] == ["tic_tac_toe", games.NAMES.index("tic_tac_toe"), "finished"]
    assert "Hint: the middle cell lies on four lines." in tic_tac_toe[3]
    assert "Hint" not in kuhn[3]


def test_the_first_environment_that_names_the_folder_plays_its_games(tmp_path):
    """Also where the built-in game, which the folder's takes the place of, has been played before."""
    write(tmp_path, my_tic_tac_toe=dict(EXAMPLES)["my_tic_tac_toe.py"])
    task = f"Task({games.NAMES.index('tic_tac_toe') * games.CONFIGS_PER_GAME}, 0)"
    shown = f"print('Hint' in make_env(config).reset({task}).info['system'])"
    program = f"from env_wrapper import *\nfor config in {{}}, {{'games_path': {str(tmp_path)!r}}}: {shown}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (result.stdout, result.stderr) == ("False\nTrue\n", "")


def test_new_games_come_in_the_order_of_their_files(tmp_path):
    write(tmp_path, b=NIM, a=NIM.replace('name="nim"', 'name="another_nim", spiel_name="nim"'), _c="raise ValueError")
    (tmp_path / "._b.py").write_bytes(b"\x00\x05\x16\x07")  # what macOS leaves beside a copy
    result = run(tmp_path)
    assert json.loads(result.stdout)["names"] == [*games.NAMES, "another_nim", "nim"]


BAD_FILES = [
    ("GAME = 1", "must define GAME, a games.base.Game"),
    ("", "must define GAME"),
    ("x = 1\ndef f(:\n", "bad.py:2: SyntaxError: invalid syntax"),
    ("\nimport sys; sys.exit(0)", "bad.py:2: SystemExit: 0"),
    ("\n\nimport no_such_module", "bad.py:3: ModuleNotFoundError: No module named 'no_such_module'"),
    (NIM.replace('name="nim"', 'name="My Nim"'), "name 'My Nim' may have"),
    (NIM.replace('name="nim"', "name=2048"), "name 2048 is not text"),
    (NIM.replace("rules=rules", 'rules=rules, spiel_name=["nim"]'), "spiel_name ['nim'] is not text"),
    (NIM.replace("rules=rules", 'rules=rules, compact_actions="no"'), "compact_actions 'no' is not True or False"),
    (NIM.replace("rules=rules", 'rules="take"'), "rules 'take' is not a function"),
    (NIM.replace("rules=rules", "rules=rules, dealt=5"), "dealt 5 is not a function"),
    (NIM.replace("history_turns=0", "history_turns=-3"), "history_turns -3 is neither None nor a number of turns"),
    (NIM.replace("mcts=(200, 10)", 'mcts="fast"'), "mcts 'fast' is neither None nor (simulations, rollouts)"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_a_file_that_is_no_game_is_one_line(tmp_path, text, message):
    result = run(write(tmp_path, bad=text))
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert re.match(rf"refused: env: games_path: {tmp_path}/bad\.py(:\d+)?: ", result.stderr)
    assert message in result.stderr


def test_a_pipe_is_no_game_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "bad.py")
    assert run(tmp_path).stderr == f"refused: env: games_path: {tmp_path}/bad.py: is no regular file\n"


def test_a_missing_folder_and_a_name_given_twice(tmp_path):
    missing = run(tmp_path / "none")
    assert missing.stderr == f"refused: env: games_path: {tmp_path}/none is not a folder\n"
    assert run(write(tmp_path, _c=NIM)).stderr.startswith(f"refused: env: games_path: {tmp_path} holds no game: ")
    twice = run(write(tmp_path, a=NIM, b=NIM))
    assert f"{tmp_path}/b.py: the game 'nim' is also in {tmp_path}/a.py" in twice.stderr


def nim_with(old, new):
    assert old in NIM
    return NIM.replace(old, new)


COUNT = """
import pyspiel
from games.base import Game

G = pyspiel.GameType
TYPE = G("count", "count", G.Dynamics.SEQUENTIAL, G.ChanceMode.DETERMINISTIC, G.Information.PERFECT_INFORMATION,
         G.Utility.ZERO_SUM, G.RewardModel.TERMINAL, 2, 2, False, False, False, False, {})
LOW, HIGH = -1.0, 1.0


class Count(pyspiel.Game):
    def __init__(self, params=None):
        super().__init__(TYPE, pyspiel.GameInfo(2, 0, 2, LOW, HIGH, 0.0, 4), params or {})

    def new_initial_state(self):
        return State(self)


class State(pyspiel.State):
    def __init__(self, game):
        super().__init__(game)
        self.moves = []

    def __str__(self):
        return f"moves {self.moves}"

    def current_player(self):
        return pyspiel.PlayerId.TERMINAL if self.is_terminal() else len(self.moves) % 2

    def is_terminal(self):
        return len(self.moves) == 4

    def _legal_actions(self, player):
        return [0, 1]

    def _apply_action(self, action):
        self.moves.append(action)

    def _action_to_string(self, player, action):
        return f"add {action}"

    def returns(self):
        won = 1.0 if sum(self.moves) > 2 else -1.0
        return [won, -won] if self.is_terminal() else [0.0, 0.0]


pyspiel.register_game(TYPE, Count)
SHOWN = lambda state, seat: str(state)
GAME = Game(name="count", rules=lambda params: "Count.", describe=SHOWN, compact=SHOWN)
"""


def changed(text, *pairs):
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


OBSERVER = """
    def make_py_observer(self, iig_obs_type=None, params=None):
        return Observer()


class Observer:
    tensor, dict = None, {}

    def set_from(self, state, player):
        pass

    def string_from(self, state, player):
        return f"seat {player} has card {state.moves[player:player + 1]}"
"""
# Each seat is dealt a card, and moves twice. What it knows, as the engine is told, leaves out the first of its moves.
HIDING = changed(
    COUNT, ('G("count", "count"', 'G("hiding", "hiding"'),
    ("DETERMINISTIC, G.Information.PERFECT", "EXPLICIT_STOCHASTIC, G.Information.IMPERFECT"),
    ("2, 2, False, False, False, False", "2, 2, True, False, True, False"),
    ("2, 0, 2, LOW, HIGH, 0.0, 4", "3, 2, 2, LOW, HIGH, 0.0, 6"),
    ("        return State(self)\n", f"        return State(self)\n{OBSERVER}"),
    ('f"moves {', 'f"all cards and moves {'),
    ("else len(self.moves) % 2", "else len(self.moves) % 2 if self.moves[1:] else pyspiel.PlayerId.CHANCE"),
    ("== 4", "== 6"),
    ("    def _legal", "    def chance_outcomes(self):\n        return [(0, 0.5), (1, 0.5)]\n\n    def _legal"),
    ("sum(self.moves) > 2", "sum(self.moves[::2]) > sum(self.moves[1::2])"),
    ("str(state)\n", "state.information_state_string(seat)\n"),
    ('name="count", rules=lambda params: "Count."', 'name="hiding", rules=lambda params: "Hiding."'),
)  # fmt: skip
KUHN = "from dataclasses import replace\nfrom games.kuhn_poker import GAME\n"

BROKEN_PROMISES = [
    (
        nim_with("def rules(params):\n", 'def rules(params):\n    return "# Current Game State"\n'),
        "rules hold '# Current Game State'",
    ),
    (nim_with('"is_misere"', '"is_misery"'), "Unknown parameter 'is_misery'"),
    (nim_with('return {"pile_sizes"', 'params = {"pile_sizes"'), "params must return a dict, not None"),
    (
        nim_with('name="nim"', 'name="my_nim"'),
        "task 2800000000: OpenSpiel has no game 'my_nim', the nearest is nim; spiel_name gives its name there\n",
    ),
    (nim_with('return "\\n".join(', '"\\n".join('), "describe and compact must return text, not [None]"),
    (nim_with('return " ".join(piles(state))', "return len(piles(state))"), "must return text, not [3]"),
    (nim_with('return "\\n".join(', 'return "" and str('), "a position has an empty description (full prompt)"),
    (nim_with('return " ".join(piles(state))', 'return ""'), "compact is empty in every position"),
    (nim_with('return " ".join(piles(state))', "return 1 / 0"), "ZeroDivisionError: division by zero"),
    (nim_with('return " ".join(piles(state))', 'return "\\ud800"'), "UnicodeEncodeError: "),
    (nim_with('return " ".join(piles(state))', "raise SystemExit(3)"), "SystemExit: 3"),
    (nim_with('return " ".join(', "return str(__import__('random').random()) + str("), "plays the task differently"),
    (nim_with("PILES[config_id % len(PILES)]", "PILES[config_id]"), "task 2800000003: IndexError: tuple index out of"),
    (
        KUHN + 'GAME = replace(GAME, name="own", spiel_name="kuhn_poker", dealt=lambda card: "JQ"[card])',
        "IndexError: string index out of range",
    ),
    (nim_with("piles = PILES[", "piles = __import__('random').choice(PILES) or ["), "params gives {'pile_sizes': '"),
    (COUNT.replace("1.0, 1.0", "0.0, 0.0"), "min_utility and max_utility must be finite and differ"),
    (COUNT.replace("1.0, 1.0", "float('inf'), float('inf')"), "min_utility and max_utility must be finite and differ"),
    (
        COUNT.replace("won = 1.0 if sum(self.moves) > 2", "won = 2.0 if self.moves == [0, 1, 0, 1]"),
        "the score 1.5 is not in",
    ),
    (COUNT.replace("[won, -won]", "[min(won, 3 * won), -won]"), "the score -1.0 is not in"),
    (COUNT.replace("[0, 1]\n", "[] if self.moves == [0, 1, 0] else [0, 1]\n"), "is not terminal has no legal actions"),
    (COUNT.replace("[won, -won]", "[won, 0.0]"), "declared ZERO_SUM, and its returns are [1.0, 0.0]"),
    (COUNT.replace("[won, -won]", "[won, -won, 0.0]"), "returns gives 3 numbers for 2 seats"),
    (COUNT.replace("len(self.moves) % 2", "len(self.moves) % 3"), "current_player is 2 of 2 seats"),
    (COUNT.replace("[0, 1]\n", "[0, 0, 1]\n"), "legal_actions gives [0, 0, 1]: an action twice"),
    (COUNT.replace("add {action}", "add\\n{action}"), "the action 0 is called 'add\\n0': expected a line"),
    (COUNT.replace("str(state)\n", "state.moves.sort() or str(state)\n"), "describe or compact changes the state"),
    (COUNT.replace("str(state)\n", "state.apply_action(0) or str(state)\n"), "an episode does not end within 5000 "),
    (COUNT.replace("False, False, False, {}", "False, False, True, {}"), "'Count' object has no attribute"),
    (nim_with("piles = PILES[config_id % len(PILES)]", "piles = (3, 4 + config_id % 70)"), "repeat within 60 ids"),
    (nim_with("piles = PILES[config_id % len(PILES)]", "piles = (3, 4 + config_id // 10**7)"), "repeat within 60 ids"),
    (HIDING.replace("[(0, 0.5), (1, 0.5)]", "[(0, 1.0), (1, 1.0)]"), "are no probabilities: their sum is 2"),
    (HIDING.replace("[(0, 0.5), (1, 0.5)]", "[(0, 1.5), (1, -0.5)]"), "are no probabilities: their sum is 1"),
    (
        HIDING.replace("True, False, True", "False, False, True").replace(
            "state.information_state_string(seat)", "str(state)"
        ),
        "the description shows seat 0 what the game hides from it",
    ),
]


@pytest.mark.parametrize(("text", "message"), BROKEN_PROMISES)
def test_a_game_that_breaks_the_contract_is_refused_with_its_file(tmp_path, text, message):
    result = run(write(tmp_path, bad=text))
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    [at] = [
        text.index(own) for own in ("1 / 0", "raise SystemExit", "PILES[config_id]", '"JQ"[card]') if own in text
    ] or [None]
    own_line = "" if at is None else f":{1 + text[:at].count(chr(10))}"
    assert result.stderr.startswith(f"refused: {tmp_path}/bad.py{own_line}: task 28")
    assert message in result.stderr


LEAK = """
from dataclasses import replace
from games.kuhn_poker import GAME as ORIGINAL
GAME = replace(ORIGINAL, describe=lambda state, seat: str(state))
"""


@pytest.mark.parametrize("original", ["kuhn_poker", "goofspiel_small"])
def test_a_description_that_shows_hidden_cards_is_refused(tmp_path, original):
    result = run(write(tmp_path, leak=LEAK.replace("kuhn_poker", original)))
    assert result.returncode == 1
    assert re.search(": the description shows seat [01] what the game hides from it$", result.stderr.strip())


def test_a_seat_that_forgets_its_moves_has_no_exact_values(caplog):
    """OpenSpiel's best response would call itself until the stack is full, and end the process without a word."""
    exec(HIDING, {})
    hiding = openspiel.pyspiel.load_game("hiding")
    assert not exact.feasible(hiding)
    told = "a seat has the information state 'seat 0 has card [0]' at two decisions of a game"
    assert caplog.messages == [f"hiding() has no exact values: ValueError: {told}"]


def test_a_constant_sum_is_scored_by_its_place_as_a_zero_sum_is(tmp_path):
    """Scored by comparison, 4 of 10 coins counted as much as none."""
    text = changed(COUNT, ("ZERO_SUM", "CONSTANT_SUM"), ("= -1.0, 1.0", "= 0.0, 10.0"),
                   ("1.0 if sum(self.moves) > 2 else -1.0", "4.0 if sum(self.moves) % 2 else 7.0"),
                   ("[won, -won]", "[won, 10 - won]"))  # fmt: skip
    result = run(write(tmp_path, count=text), "count")
    assert (result.returncode, result.stderr) == (0, "")
    [[*_, info]] = json.loads(result.stdout)["played"]
    assert info["returns"] in ([4, 6], [7, 3])
    assert info["scores"] == {str(seat): coins / 10 for seat, coins in enumerate(info["returns"])}


def test_a_parameter_that_one_configuration_leaves_out_is_named():
    def params(config_id):
        return {"num_cards": 4} | ({"points_order": "descending"} if config_id % 2 == 0 else {})

    own = replace(games.GAMES[0], name="own", spiel_name="goofspiel", params=params, rules=lambda params: "Own.")
    usual, other = (openspiel._table(own, json.dumps(params(config_id))).systems["compact"] for config_id in (0, 1))
    assert (usual, other) == ("own", "own points_order=random")


@pytest.mark.parametrize(("utility", "returns", "warnings"), [
    ("GENERAL_SUM", "[won, won]", 1), ("IDENTICAL", "[won, won]", 0), ("GENERAL_SUM", "[won, -won]", 0),
])  # fmt: skip
def test_a_game_whose_scores_are_always_even_is_warned_of_once(tmp_path, utility, returns, warnings):
    text = COUNT.replace("ZERO_SUM", utility).replace("[won, -won]", returns)
    told = f"task {28 * 10**8}: in 30 random games all got the same, and a general-sum game is scored by comparison"
    result = run(write(tmp_path, mine=text))
    assert (result.returncode, result.stderr.count("\n"), result.stderr.count(told)) == (0, warnings, warnings)


@pytest.mark.slow
def test_every_program_refuses_a_bad_game_before_anything_else(tmp_path):
    bad = write(tmp_path, bad=nim_with('"is_misere"', '"is_misery"'))
    train = ["train_ppo.py", "--config", "config/presets/tiny.json", "--output-dir", str(tmp_path / "out")]
    own = ["--set", f"env.games_path={bad}"]
    lone = ["scripts/evaluate.py", "--checkpoint", "random", "--games", "nim", "--episodes", "2"]
    for program in ([*train, *own], ["scripts/serve.py", "--port", "0", "--games-path", bad], [*lone, *own], train):
        environment = os.environ | ({"OPENSPIEL_AGENTS_PATH": str(bad)} if program is train else {})
        command = [sys.executable, *program]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=60)
        assert result.returncode == 2
        assert f"{tmp_path}/bad.py: task 2800000000: " in result.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------- a run keeps its own


@pytest.fixture
def forget(monkeypatch):
    """Make this process one that has met no game but the built-in ones; done at the end, too."""
    built_in = list(games.GAMES)

    def forgotten():
        games.GAMES[:], games.NAMES[:], games._folder = built_in, [game.name for game in built_in], ""
        games.OWN.clear()
        check_own_games.cache_clear()
        table.cache_clear()

    yield forgotten
    forgotten()


def test_a_folder_is_named_in_full_and_there_is_one(tmp_path, forget, monkeypatch):
    monkeypatch.setenv("HOME", str(write(tmp_path, nim=NIM)))
    monkeypatch.chdir(tmp_path)
    disguised = ("/proc/self/cwd", "/usr/../proc/self/cwd/", "//proc/self/root/tmp", "/dev/fd/../cwd")
    (tmp_path / "link").symlink_to("/proc/self")
    for wrong in (".", "games", "~nobody-of-that-name", *disguised, str(tmp_path / "link" / "cwd")):
        with pytest.raises(ConfigError, match=rf"env: games_path '{wrong}' is not allowed: a path from / or ~ on"):
            make(EnvConfig, {"games_path": wrong}, "env")
    for spelled in ("~", "~", "~/", str(tmp_path)):
        EnvConfig(games_path=spelled)
    assert games.NAMES[28:] == ["nim"]
    with pytest.raises(ConfigError, match=rf"the games of {tmp_path}/b cannot be in one program with those of ~"):
        make(EnvConfig, {"games_path": f"{tmp_path}/b"}, "env")


def test_a_name_of_ones_own_comes_before_a_synonym_in_any_case(tmp_path, forget):
    games.add(str(write(tmp_path, ttt=nim_with('name="nim"', 'name="ttt", spiel_name="nim"'))))
    assert [games.find(name) for name in ("ttt", "TTT", "noughts-and-crosses")] == ["ttt", "ttt", "tic_tac_toe"]


def test_a_game_on_another_game_is_known_by_its_parameters():
    """OpenSpiel takes those of a game within a game."""
    inner = {"name": "goofspiel", "num_cards": 3, "imp_info": True}
    made = replace(
        games.GAMES[0], name="turns", spiel_name="turn_based_simultaneous_game", rules=lambda params: "Turns."
    )
    at = openspiel._table(made, json.dumps({"game": inner}))
    assert at.spiel.num_players() == 2


def test_a_run_keeps_its_games_and_every_program_finds_them(tmp_path, forget, monkeypatch, capsys):
    own = tmp_path / "own"
    own.mkdir()
    write(own, nim=NIM)
    run, steps = str(tmp_path / "run"), "ppo.num_train_steps={}".format
    nim = {"ppo": {"num_train_steps": 1}, "curriculum": {"stages": [{"name": "mine", "games": ["nim"]}]}}
    assert train(tmp_path, "--set", f"env.games_path={own}", **nim) == 0

    forget()
    assert train_ppo.main(["--resume", run, "--set", steps(2)]) == 0
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    forget()
    assert evaluate.main(["--checkpoint", run, "--episodes", "2"]) == 0
    shown = capsys.readouterr()
    assert re.search(r"^nim#\* +2 ", shown.out, re.MULTILINE)
    assert "have changed" not in shown.err
    forget()
    write(own, nim=NIM + "# another\n")
    assert evaluate.main(["--checkpoint", run, "--episodes", "2"]) == 0
    assert "checkpoint-000002: your own games have changed since it was trained, so" in capsys.readouterr().err
    write(own, nim=NIM)
    forget()
    monkeypatch.setattr("builtins.input", lambda _: "q")
    assert play.main(["--checkpoint", run, "--game", "nim#1"]) == 0
    assert "Pile 1: 1 tokens\nPile 2: 3 tokens\nPile 3: 5 tokens" in capsys.readouterr().out
    forget()
    assert merge.main(["--checkpoint", run, "--output", str(tmp_path / "merged"), "--deals", "2"]) == 0
    assert "play nim" in (tmp_path / "merged" / "README.md").read_text()
    forget()
    assert visualize.main(["--run", run]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    episode = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["runs"][0]["episodes"][0]
    assert episode["frames"][0]["text"] == "Pile 1: 3 tokens\nPile 2: 4 tokens\nPile 3: 5 tokens"
    assert re.fullmatch(r"pile:\d, take:\d;", episode["frames"][0]["moves"][0]["name"])
    (own / "nim.py").unlink()
    forget()
    assert visualize.main(["--run", run]) == 0  # all but the replays
    lines = capsys.readouterr().err.splitlines()
    assert re.search(r"^WARNING: .*run_config.json: env: games_path: ", lines[0])
    assert re.fullmatch(r"WARNING: run: (\d+) of \1 games are shown turn by turn: step 2, nim: .*", lines[1])
    write(own, nim=NIM)
    forget()
    with running_server("--run", run) as url:
        told = httpx.post(f"{url}/reset", json={"task_id": 2_800_000_001, "seed": 0, "opponent": "random"}).json()
    assert "Pile 1: 1 tokens" in told["result"]["observation"]


def test_a_resume_holds_a_run_to_its_games_wherever_they_lie(tmp_path, forget, capsys, monkeypatch):
    for place in (old := tmp_path / "old", new := tmp_path / "new"):
        place.mkdir()
        write(place, nim=NIM)
    file = micro_file(tmp_path, ppo={"num_train_steps": 1}, env={"games_path": str(old)})
    assert train_ppo.main(["--config", file, "--output-dir", str(tmp_path / "run"), "--set", "games=nim"]) == 0
    (old / "nim.py").unlink()
    old.rmdir()
    on = ["--resume", str(tmp_path / "run"), "--set", "ppo.num_train_steps=2"]
    forget()
    capsys.readouterr()
    assert train_ppo.main(on) == 2
    assert capsys.readouterr().err == f"error: env: games_path: {old} is not a folder\n"
    write(new, nim=NIM + "# another\n")
    moved = [*on, "--set", f"env.games_path={new}"]
    monkeypatch.setattr("training.state.load_policy", None)  # no model is loaded for it
    for dry in ([], ["--dry-run"]):
        forget()
        assert train_ppo.main([*moved, *dry]) == 2
        assert f"the games of {new} are not those that it was trained with; --force" in capsys.readouterr().err
    monkeypatch.undo()
    write(new, nim=NIM)
    forget()
    assert train_ppo.main(moved) == 0
    assert read_json(tmp_path / "run" / "checkpoint-000002" / "run_config.json")["env"]["games_path"] == str(new)


def test_the_variable_that_named_the_games_yields_to_a_file(tmp_path, forget, monkeypatch, caplog):
    caplog.set_level("INFO")
    for place in (old := tmp_path / "old", new := tmp_path / "new"):
        place.mkdir()
        write(place, nim=NIM)
    monkeypatch.setenv("OPENSPIEL_AGENTS_PATH", str(old))
    for given, used in ([], old), (["--config", micro_file(tmp_path, env={"games_path": str(new)})], new):
        forget()
        assert read_config(parse_args([*given, "--set", "games=nim"], None)).env.games_path == str(used)
    monkeypatch.setenv("OPENSPIEL_AGENTS_PATH", "games")
    with pytest.raises(ConfigError, match=r"^env: games_path 'games' is not allowed"):
        read_config(parse_args([], None))
    assert caplog.messages[-1] == "environment: OPENSPIEL_AGENTS_PATH is read as env.games_path"


def test_what_is_no_path_in_a_runs_configuration_is_one_line(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for wrong, told in ((1, "= 1: expected a string"), ("x", "is not allowed: a path from / or ~ on, not in /proc")):
        (tmp_path / "run_config.json").write_text(json.dumps({"env": {"games_path": wrong}}))
        assert visualize.main(["--run", str(tmp_path)]) == 0  # only replays need these games
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("WARNING: ")
        assert line.endswith(told)


NUMPY = COUNT
for plain, numpys in {
    "DETERMINISTIC": "EXPLICIT_STOCHASTIC", "(2, 0, 2, LOW": "(2, 2, 2, LOW", "[won, -won]": "np.array([won, -won])",
    "len(self.moves) % 2": "len(self.moves) % 2 if self.moves else pyspiel.PlayerId.CHANCE",
    "import pyspiel": "import numpy as np, pyspiel",
    "    def returns": "    def chance_outcomes(self):\n        return [(np.int64(1), 1.0)]\n\n    def returns",
}.items():  # fmt: skip
    NUMPY = NUMPY.replace(plain, numpys)


@pytest.mark.parametrize("text", [COUNT, NUMPY])
def test_a_game_written_in_python_passes_the_check_and_its_record_can_be_written(tmp_path, text):
    result = run(write(tmp_path, count=text), "count")
    assert (result.returncode, result.stderr) == (0, "")
    [[*_, info]] = json.loads(result.stdout)["played"]
    assert (len(info["history"]), sum(info["returns"])) == (4, 0)


def test_a_game_that_may_be_over_before_a_seat_is_asked_passes_the_check(tmp_path, forget):
    write(tmp_path, nim=nim_with("PILES = (", "PILES = ((4,), "))  # seat 0 may take all
    games.add(str(tmp_path))
    check_own_games()


def test_parameters_that_nothing_checked_are_one_line_where_they_are_met():
    late = replace(games.GAMES[0], name="late", spiel_name="nim", rules=lambda params: "Nim.")
    with pytest.raises(ConfigError, match=r"^late: .*'x' of pile_sizes"):
        openspiel._table(late, json.dumps({"pile_sizes": "3;x"}))


LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("hearts", "gin_rummy")]


@pytest.mark.parametrize("name", ["kuhn_poker", "goofspiel_small", "blackjack", *LONG])
def test_the_built_in_games_pass_the_check(name):
    check_game(name)


def test_an_endless_game_is_refused(monkeypatch):
    monkeypatch.setattr("envs.contract.LONGEST", 3)
    with pytest.raises(ContractError, match="does not end within 3 decisions"):
        check_game("hex_small")


def test_a_search_of_two_sides_is_not_for_three_players():
    three = openspiel.pyspiel.load_game("kuhn_poker", {"players": 3})
    kuhn = games.GAMES[games.NAMES.index("kuhn_poker")]
    with pytest.raises(ValueError, match="ismcts cannot play kuhn_poker of 3 players: it needs two sides"):
        make_bot(kuhn, three, parse_opponent("ismcts:2x1"), 2, 0)
    euchre = replace(games.GAMES[games.NAMES.index("euchre")], name="own", spiel_name="euchre")
    assert make_bot(euchre, openspiel.pyspiel.load_game("euchre"), parse_opponent("ismcts:2x1"), 2, 0).seat == 2


@pytest.mark.parametrize("opponent", ["mcts:2x1", "ismcts:2x1"])
def test_a_game_that_pays_on_the_way_is_played_at_random(opponent):
    cribbage = openspiel.pyspiel.load_game("cribbage")
    assert isinstance(make_bot(games.GAMES[0], cribbage, parse_opponent(opponent), 1, 0), RandomBot)


SEARCH_PYTHON = """
import pyspiel, open_spiel.python.games.tic_tac_toe
import games
from envs.opponents import make_bot, parse_opponent
for text in ("python_tic_tac_toe", "misere(game=python_tic_tac_toe())"):
    spiel = pyspiel.load_game(text)
    state = spiel.new_initial_state()
    for action in (0, 3, 1, 4):
        state.apply_action(action)
    for kind in ("mcts", "ismcts"):
        spec = parse_opponent(kind + ":100x2")
        moves = [make_bot(games.GAMES[0], spiel, spec, 0, 7).step(state) for _ in range(2)]
        assert moves == [2, 2] if text == "python_tic_tac_toe" else moves[0] == moves[1] != 2, (text, moves)
# What the search's own step would have done, in a game that bears it
spiel = pyspiel.load_game("misere(game=tic_tac_toe())")
bots = [make_bot(games.GAMES[0], spiel, parse_opponent("mcts:20x1"), 0, 7) for _ in range(2)]
assert bots[0].step(spiel.new_initial_state()) == bots[1]._search.step(spiel.new_initial_state())
assert make_bot(games.GAMES[0], spiel, parse_opponent("mcts:1x1"), 0, 7).step(spiel.new_initial_state()) == 0
spiel = pyspiel.load_game("tic_tac_toe")  # of a module below pyspiel, and no Python
assert type(make_bot(games.GAMES[0], spiel, parse_opponent("mcts:5x1"), 0, 7)) is pyspiel.MCTSBot
"""


def test_a_game_written_in_python_can_be_searched():
    result = subprocess.run([sys.executable, "-c", SEARCH_PYTHON], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr or result.returncode
