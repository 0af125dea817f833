"""Tic-tac-toe."""

from __future__ import annotations

from typing import Any

from games.base import Game, State, signed


def _rules(params: dict[str, Any]) -> str:
    return (
        "Tic-tac-toe on a 3x3 board. Player 0 plays x and moves first, Player 1 plays o. The players take turns to "
        "put one mark on an empty cell. Three own marks in a row, column or diagonal win; a full board without such a "
        "line is a draw.\n"
        "An action is named mark(row,column), rows counted from the top and columns from the left, both from 0; its "
        "ID is 3 * row + column. On the board . is an empty cell."
    )


def _describe(state: State, seat: int) -> str:
    rows = [f"{r} {' '.join(row)}" for r, row in enumerate(str(state).split())]
    return "\n".join([f"You play {'xo'[seat]}.", "  0 1 2", *rows])


def _compact(state: State, seat: int) -> str:
    """Each mark with its cell, a to i row by row; a dot for an empty board."""
    cells = zip("".join(str(state).split()), "abcdefghi", strict=True)
    return "".join(signed(mark, seat, cell) for mark, cell in cells if mark != ".") or "."


GAME = Game(
    name="tic_tac_toe",
    params=lambda config_id: {},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(1000, 20),
    compact_actions=False,
)
