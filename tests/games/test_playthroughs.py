"""The golden playthroughs, replayed line by line: what a game shows and how it plays may not change unnoticed."""

from itertools import zip_longest

import pytest
from transcribe import FOLDER, transcribe

import games
from env_wrapper import Task

# Task ids are made of a game's place in this list: append only.
FROZEN_NAMES = [
    "goofspiel", "liars_dice", "leduc_poker", "gin_rummy", "othello", "backgammon", "hex", "clobber",
    "hearts", "euchre", "dots_and_boxes", "go", "chess", "checkers", "quoridor", "blackjack",
    "phantom_ttt", "2048", "solitaire", "bridge", "amazons", "oware",
    "kuhn_poker", "tic_tac_toe", "connect_four", "liars_dice_small", "goofspiel_small", "hex_small",
]  # fmt: skip


def test_the_order_of_the_games_is_kept():
    assert list(games.NAMES) == [game.name for game in games.GAMES]
    assert list(games.NAMES)[: len(FROZEN_NAMES)] == FROZEN_NAMES
    assert games.CONFIGS_PER_GAME == 100_000_000


def test_every_game_has_a_playthrough_and_every_playthrough_a_game():
    files = {path.stem for path in FOLDER.glob("*.txt")}
    assert sorted(files) == sorted(games.NAMES), "python tests/tools/transcribe.py GAME writes one"
    assert max(path.stat().st_size for path in FOLDER.glob("*.txt")) < 40_000


@pytest.mark.parametrize("name", FROZEN_NAMES)
def test_playthrough(name):
    recorded = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    head = dict(line.split(": ") for line in recorded[:4])
    task = Task(int(head["task_id"]), int(head["seed"]), head["opponent"])
    assert (head["game"], games.decode_task_id(task.task_id)[0].name) == (name, name)
    answers = [int(line.removeprefix("answer: ")) for line in recorded if line.startswith("answer: ")]
    for number, (old, new) in enumerate(zip_longest(recorded, transcribe(task, answers)), 1):
        assert new == old, f"{name}.txt, line {number}"
