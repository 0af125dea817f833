"""Connect four on the usual 6x7 board."""

from __future__ import annotations

from typing import Any

from games.base import Game, State

SWAP = str.maketrans("xo", "ox")


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
    """Seven columns from the left, each from the bottom up; x is always the player in ``seat``."""
    columns = ("".join(column)[::-1] for column in zip(*str(state).split(), strict=True))
    board = " ".join(columns)
    return board if seat == 0 else board.translate(SWAP)


GAME = Game(
    name="connect_four",
    params=lambda config_id: {},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(1000, 20),
    compact_names=False,
)
