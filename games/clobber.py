"""Clobber on square boards of 5, 6 and 7."""

from __future__ import annotations

from typing import Any

from games.base import Game, State

SWAP = str.maketrans("xo", "ox")


def _rules(params: dict[str, Any]) -> str:
    rows, columns = params.get("rows", 5), params.get("columns", 6)
    last = chr(ord("a") + columns - 1)
    return (
        f"Clobber on a board of {rows} rows and {columns} columns, filled with stones in a checkerboard pattern. "
        "Player 0 owns the o stones and moves first, Player 1 owns the x stones. A move takes one own stone to a "
        "horizontally or vertically neighbouring cell that holds an opposing stone, which is removed. Every move must "
        "capture. A player who cannot move loses; there are no draws.\n"
        f"A move is named from-to (a2b2: the stone on a2 captures b2), columns a-{last} from the left, rows 1-{rows} "
        "from the bottom. On the board . is an empty cell."
    )


def _rows(state: State) -> list[str]:
    lines = str(state).splitlines()
    return [line[1:] for line in lines if line[:1].isdigit()]


def _describe(state: State, seat: int) -> str:
    rows = _rows(state)
    board = [f"{len(rows) - i} {' '.join(row)}" for i, row in enumerate(rows)]
    columns = " ".join(chr(ord("a") + i) for i in range(len(rows[0])))
    return "\n".join([f"You play {'ox'[seat]}.", *board, f"  {columns}"])


def _compact(state: State, seat: int) -> str:
    """The rows from the top; x is always the player in ``seat``."""
    board = "/".join(_rows(state))
    return board if seat == 1 else board.translate(SWAP)


GAME = Game(
    name="clobber",
    params=lambda config_id: {"rows": 5 + config_id % 3, "columns": 5 + config_id % 3},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(1500, 100),
)
