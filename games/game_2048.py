"""2048, the sliding-tile puzzle (the module cannot be called by its name)."""

from __future__ import annotations

from typing import Any

from games.base import Game, State


def _rules(params: dict[str, Any]) -> str:
    return """2048: slide numbered tiles on a 4x4 grid; 0 is an empty cell.
- A move slides all tiles as far as they go in one direction. Two equal tiles that meet merge into one of double \
value; a tile merges once a move. You score the value of each merged tile.
- Then a new tile appears in a random empty cell: 2 (nine times in ten) or 4. The grid starts with two such tiles.
- Only directions that change the grid are allowed. The game ends when there is none, or when a 2048 tile is made.
- Score as many points as you can.
- Actions: 0 Up, 1 Right, 2 Down, 3 Left."""


def _describe(state: State, seat: int) -> str:
    return str(state).rstrip()


def _compact(state: State, seat: int) -> str:
    return "/".join(",".join(row.split()) for row in str(state).rstrip().splitlines())


GAME = Game(
    name="2048",
    params=lambda c: {},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    history_turns=0,
)
