"""Games of users' own: the files of a folder that add games or replace built-in ones. See docs/adding_a_game.md."""

import os
import re
import runpy
import traceback
from pathlib import Path

from games.base import Game


def extend(games: list[Game], folder: str) -> tuple[list[Game], dict[str, str]]:
    """Return the games with those of a folder, and the file of each of the folder's.

    A game with a new name comes after the others, in the order of the file names; one with the name of a built-in
    game takes its place.

    Raises:
        ValueError: there is no such folder, or a file and its line that is no game.
    """
    files: dict[str, str] = {}
    if not (home := Path(os.path.expanduser(folder))).is_dir():
        raise ValueError(f"{folder} is not a folder")
    for path in sorted(path for path in home.glob("*.py") if not path.name.startswith("_")):
        game = _load(path)
        if game.name in files:
            raise ValueError(f"{path}: the game {game.name!r} is also in {files[game.name]}")
        files[game.name] = str(path)
        games = list(({known.name: known for known in games} | {game.name: game}).values())
    return games, files


def place(file: str, error: BaseException | None) -> str:
    """The file, and the line of it in which an error arose, where it was one of its own."""
    frames = traceback.extract_tb(error.__traceback__) if error else []
    lines = [frame.lineno for frame in frames if frame.filename == file]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f"{file}:{line}" if line else file


def _load(path: Path) -> Game:
    if not path.is_file():  # of a pipe Python would wait for the end
        raise ValueError(f"{path}: is no regular file")
    try:
        game = runpy.run_path(str(path), run_name=f"custom_game_{path.stem}").get("GAME")
    except (Exception, SystemExit) as error:  # somebody's file runs here
        told = " ".join(str(error).split())
        raise ValueError(f"{place(str(path), error)}: {type(error).__name__}: {told}") from error
    if not isinstance(game, Game):
        raise ValueError(f"{path}: it must define GAME, a games.base.Game")
    if not re.fullmatch("[0-9]*[a-z_][a-z0-9_]*|2048", str(game.name)):
        raise ValueError(
            f"{path}: the name {game.name!r} may have lower-case letters, digits and _ only, and needs a letter"
        )
    for field in ("params", "rules", "describe", "compact", *(["dealt"] if game.dealt is not None else [])):
        if not callable(getattr(game, field)):
            raise ValueError(f"{path}: {field} {getattr(game, field)!r} is not a function")
    turns, pair = game.history_turns, isinstance(game.mcts, tuple) and len(game.mcts) == 2
    if not (turns is None or (type(turns) is int and turns >= 0)):
        raise ValueError(f"{path}: history_turns {turns!r} is neither None nor a number of turns, 0 or more")
    if game.mcts is not None and not (pair and all(type(n) is int and n > 0 for n in game.mcts)):
        raise ValueError(f"{path}: mcts {game.mcts!r} is neither None nor (simulations, rollouts)")
    return game
