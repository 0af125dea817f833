"""The games, in an order that is part of the API: ``task_id = index * 100_000_000 + config_id``. Append only."""

import difflib
import hashlib
import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from games.base import Game
from games.custom import extend

CONFIGS_PER_GAME = 100_000_000

NAMES = [
    "goofspiel", "liars_dice", "leduc_poker", "gin_rummy", "othello", "backgammon", "hex", "clobber",
    "hearts", "euchre", "dots_and_boxes", "go", "chess", "checkers", "quoridor", "blackjack",
    "phantom_ttt", "2048", "solitaire", "bridge", "amazons", "oware",
    # Not in the public list: small games for teaching and for exact evaluation.
    "kuhn_poker", "tic_tac_toe", "connect_four", "liars_dice_small", "goofspiel_small", "hex_small",
]  # fmt: skip

SYNONYMS = {
    "ttt": "tic_tac_toe", "noughtsandcrosses": "tic_tac_toe", "connect4": "connect_four", "fourinarow": "connect_four",
    "phantomtictactoe": "phantom_ttt", "leduc": "leduc_poker", "kuhn": "kuhn_poker", "gin": "gin_rummy",
    "reversi": "othello", "draughts": "checkers", "mancala": "oware", "klondike": "solitaire", "baduk": "go",
}  # fmt: skip


def find(name: str) -> str:
    """Return the name of the game meant by, say, ``TicTacToe`` or ``ttt``; ValueError if there is none."""
    if name in NAMES:
        return name
    plain = SYNONYMS | {re.sub("[^a-z0-9]", "", known): known for known in NAMES}
    typed = re.sub("[^a-z0-9]", "", name.lower())
    if typed in plain:
        return plain[typed]
    near = [plain[key] for key in difflib.get_close_matches(typed[:99], plain, 1, 0.7)]
    near = near or [known for key, known in plain.items() if len(typed) > 2 and key.startswith(typed)]
    meant = f", the nearest is {near[0]}" if near else ""
    raise ValueError(f"game {name!r} is not known{meant}: allowed are {', '.join(NAMES)}, and those of env.games_path")


GAMES: list[Game] = [import_module("games." + name.replace("2048", "game_2048")).GAME for name in NAMES]
OWN: dict[str, str] = {}  # name of a user's game -> the file that defines it
_folder = ""  # the folder of these files


def add(folder: str) -> None:
    """Add the games in a user's folder, the only one, because task ids count the games; ValueError names what fails."""
    global _folder
    if _folder and os.path.realpath(os.path.expanduser(folder)) != os.path.realpath(os.path.expanduser(_folder)):
        raise ValueError(f"the games of {folder} cannot be in one program with those of {_folder}")
    if not _folder:
        GAMES[:], files = extend(GAMES, folder)
        NAMES[:], _folder = [game.name for game in GAMES], folder
        OWN.update(files)


def own_digest() -> str:
    """Return the SHA-256 of the user's game files; "" if there are none."""
    return hashlib.sha256(b"\0".join(Path(file).read_bytes() for file in OWN.values())).hexdigest() if OWN else ""


def decode_task_id(task_id: int) -> tuple[Game, dict[str, Any]]:
    """Return the game of a task id and its parameters; ValueError if the id is out of range."""
    if not 0 <= task_id < len(GAMES) * CONFIGS_PER_GAME:
        raise ValueError(f"task_id {task_id} is out of range: allowed are 0 to {len(GAMES) * CONFIGS_PER_GAME - 1}")
    game = GAMES[task_id // CONFIGS_PER_GAME]
    return game, game.params(task_id % CONFIGS_PER_GAME)
