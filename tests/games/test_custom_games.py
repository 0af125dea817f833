"""OPENSPIEL_AGENTS_PATH: users' own games, the page that explains them, and one line for a bad file."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import games
from envs.contract import ContractError, check_game

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding_a_game.md").read_text()
EXAMPLES = re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
NIM = dict(EXAMPLES)["nim.py"]

PROGRAM = """
import json, sys
import games
from env_wrapper import Action, EnvConfig, Task, check_games, play

class First:
    def act(self, queries):
        self.system = queries[0].conversation[0]["content"]
        return [Action(str(min(query.legal))) for query in queries]

try:
    check_games()
    config = EnvConfig()
except ValueError as error:
    sys.exit(f"refused: {error}")
player, played = First(), []
for name in sys.argv[1:]:
    [episode] = play(config, player, [Task(games.NAMES.index(name) * games.CONFIGS_PER_GAME + 2, 0, "mcts:5x1")])
    played.append([name, games.NAMES.index(name), episode.outcome, player.system])
print(json.dumps({"names": games.NAMES, "played": played}))
"""


def run(folder, *names, program=PROGRAM):
    environment = os.environ | {"OPENSPIEL_AGENTS_PATH": str(folder)}
    command = [sys.executable, "-c", program, *names]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


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


def test_new_games_come_in_the_order_of_their_files(tmp_path):
    write(tmp_path, b=NIM, a=NIM.replace('name="nim"', 'name="another_nim", spiel_name="nim"'), _c="raise ValueError")
    result = run(tmp_path)
    assert json.loads(result.stdout)["names"] == [*games.NAMES, "another_nim", "nim"]


BAD_FILES = [
    ("GAME = 1", "must define GAME, a games.base.Game"),
    ("", "must define GAME"),
    ("x = 1\ndef f(:\n", "bad.py:2: SyntaxError: invalid syntax"),
    ("\n\nimport no_such_module", "bad.py:3: ModuleNotFoundError: No module named 'no_such_module'"),
    (NIM.replace('name="nim"', 'name="My Nim"'), "name 'My Nim' may have"),
    (NIM.replace("rules=rules", 'rules="take"'), "rules 'take' is not a function"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_a_file_that_is_no_game_is_one_line_and_exit_code_2(tmp_path, text, message):
    result = run(write(tmp_path, bad=text))
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert re.match(rf"OPENSPIEL_AGENTS_PATH: {tmp_path}/bad\.py(:\d+)?: ", result.stderr)
    assert message in result.stderr


def test_a_missing_folder_and_a_name_given_twice(tmp_path):
    missing = run(tmp_path / "none")
    assert (missing.returncode, missing.stderr) == (2, f"OPENSPIEL_AGENTS_PATH: {tmp_path}/none is not a folder\n")
    twice = run(write(tmp_path, a=NIM, b=NIM))
    assert twice.returncode == 2
    assert f"{tmp_path}/b.py: the game 'nim' is also in {tmp_path}/a.py" in twice.stderr


def nim_with(old, new):
    assert old in NIM
    return NIM.replace(old, new)


BROKEN_PROMISES = [
    (nim_with('"is_misere"', '"is_misery"'), "Unknown parameter 'is_misery'"),
    (nim_with('name="nim"', 'name="no_such_game"'), "no_such_game"),
    (nim_with('return "\\n".join(', 'return "" and str('), "a position has an empty description (full prompt)"),
    (nim_with('return " ".join(piles(state))', "return 1 / 0"), "ZeroDivisionError: division by zero"),
    (nim_with('return " ".join(', "return str(__import__('random').random()) + str("), "plays another game"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN_PROMISES)
def test_a_game_that_breaks_the_contract_is_refused_with_its_file(tmp_path, text, message):
    result = run(write(tmp_path, bad=text))
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    assert result.stderr.startswith(f"refused: {tmp_path}/bad.py: task 28")
    assert message in result.stderr


LEAK = """
from dataclasses import replace
from games.kuhn_poker import GAME as ORIGINAL
GAME = replace(ORIGINAL, describe=lambda state, seat: str(state))
"""


def test_a_description_that_shows_hidden_cards_is_refused(tmp_path):
    result = run(write(tmp_path, leak=LEAK))
    assert result.returncode == 1
    assert re.search(": the description shows seat [01] what the game hides from it$", result.stderr.strip())


def test_training_and_serving_refuse_a_bad_game_before_anything_else(tmp_path):
    bad = write(tmp_path, bad=nim_with('"is_misere"', '"is_misery"'))
    environment = os.environ | {"OPENSPIEL_AGENTS_PATH": str(bad)}
    train = ["train_ppo.py", "--config", "config/presets/tiny.json", "--output-dir", str(tmp_path / "out")]
    for program in (train, ["scripts/serve.py", "--port", "0"]):
        command = [sys.executable, *program]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=60)
        assert result.returncode == 2
        assert f"{tmp_path}/bad.py: task 2800000000: " in result.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_the_built_in_games_pass_the_check():
    for name in ("kuhn_poker", "goofspiel_small", "hearts", "gin_rummy", "blackjack"):
        check_game(name)


def test_an_endless_game_is_refused(monkeypatch):
    monkeypatch.setattr("envs.contract.LONGEST", 3)
    with pytest.raises(ContractError, match="does not end within 3 decisions"):
        check_game("hex_small")
