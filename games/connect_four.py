"""Connect four on the usual 6x7 board."""

from __future__ import annotations

from typing import Any

from games.base import Game, State, signed


def _rules(params: dict[str, Any]) -> str:
    return (
        "Connect four on a board of 6 rows and 7 columns. Player 0 plays x and moves first, Player 1 plays o. The "
        "players take turns to drop one disc into a column that is not full; it falls to the lowest empty cell. Four "
        "own discs in a horizontal, vertical or diagonal line win; a full board without such a line is a draw.\n"
        "An action is named by disc and column (x3), columns are counted from the left from 0 and the ID is the "
        "column. On the board . is an empty cell and the bottom row is the lowest."
    )


def _describe(state: State, seat: int) -> str:
    rows = [" ".join(row) for row in str(state).split()]
    return "\n".join([f"You play {'xo'[seat]}.", "0 1 2 3 4 5 6", *rows])


def _compact(state: State, seat: int) -> str:
    """Each disc with its column, a to g, and its row, a the lowest; a dot for an empty board."""
    rows = list(zip("abcdef", reversed(str(state).split()), strict=True))
    discs = [(row[i], column + height) for i, column in enumerate("abcdefg") for height, row in rows]
    return "".join(signed(disc, seat, cell) for disc, cell in discs if disc != ".") or "."


GAME = Game(
    name="connect_four",
    params=lambda config_id: {},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(1000, 20),
    compact_actions=False,
)
