"""Users' own games: files in a folder that add games or replace built-in ones. See docs/adding_a_game.md."""

import os
import re
import runpy
import traceback
from pathlib import Path

from games.base import Game


def extend(games: list[Game], folder: str) -> tuple[list[Game], dict[str, str]]:
    """Return the games together with those in a folder, and the file of each game in the folder.

    New games come after the others, in the order of the file names; one with a built-in game's name takes its place.
    ValueError: there is no such folder, or a file (named, with its line) does not define a game.
    """
    by_name, files = {game.name: game for game in games}, dict[str, str]()
    if not (home := Path(os.path.expanduser(folder))).is_dir():
        raise ValueError(f"{folder} is not a folder")
    if not (paths := sorted(path for path in home.glob("*.py") if path.name[0] not in "_.")):
        raise ValueError(f"{folder} holds no game: expected files like nim.py in it")
    for path in paths:
        game = _load(path)
        if game.name in files:
            raise ValueError(f"{path}: the game {game.name!r} is also in {files[game.name]}")
        by_name[game.name], files[game.name] = game, str(path)
    return list(by_name.values()), files


def place(file: str, error: BaseException | None) -> str:
    """Return ``file:line`` where an error arose in a line of ``file``, else ``file``."""
    frames = traceback.extract_tb(error.__traceback__) if error else []
    lines = [frame.lineno for frame in frames if frame.filename == file]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f"{file}:{line}" if line else file


def _load(path: Path) -> Game:
    if not path.is_file():  # reading a pipe could block forever
        raise ValueError(f"{path}: is no regular file")
    try:
        game = runpy.run_path(str(path), run_name=f"custom_game_{path.stem}").get("GAME")
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        message = " ".join(str(error).split())
        raise ValueError(f"{place(str(path), error)}: {type(error).__name__}: {message}") from error
    if not isinstance(game, Game):
        raise ValueError(f"{path}: it must define GAME, a games.base.Game")
    for field, kind in {"name": str, "spiel_name": str, "compact_actions": bool}.items():
        if type(value := getattr(game, field)) is not kind:  # "no" would count as true
            raise ValueError(f"{path}: {field} {value!r} is not {'text' if kind is str else 'True or False'}")
    if not re.fullmatch("[0-9]*[a-z_][a-z0-9_]*|2048", game.name):
        raise ValueError(
            f"{path}: the name {game.name!r} may have lower-case letters, digits and _ only, and needs a letter"
        )
    for field in ("params", "rules", "describe", "compact", "dealt"):
        function = getattr(game, field)
        if not callable(function) and not (field == "dealt" and function is None):
            raise ValueError(f"{path}: {field} {function!r} is not a function")
    turns, budget = game.history_turns, game.mcts
    if turns is not None and not (type(turns) is int and turns >= 0):
        raise ValueError(f"{path}: history_turns {turns!r} is neither None nor a number of turns, 0 or more")
    pair = isinstance(budget, tuple) and len(budget) == 2
    if budget is not None and not (pair and all(type(n) is int and n > 0 for n in budget)):
        raise ValueError(f"{path}: mcts {budget!r} is neither None nor (simulations, rollouts)")
    return game
