"""Hex on boards of 5, 7, 9 and 11."""

from __future__ import annotations

from typing import Any

from games.base import Game, State

SWAP = str.maketrans("xo", "ox")


def _rules(params: dict[str, Any]) -> str:
    n = params.get("board_size", 11)
    last = chr(ord("a") + n - 1)
    return (
        f"Hex on a {n}x{n} board of hexagonal cells. Player 0 plays x and moves first, Player 1 plays o. The players "
        "take turns to put one stone on an empty cell; stones never move and nothing is captured.\n"
        "x wins by connecting the top row (1) with the bottom row "
        f"({n}), o by connecting the left column (a) with the right column ({last}) by a chain of own stones. There "
        "are no draws and there is no swap move.\n"
        f"A cell is named column letter a-{last}, row number 1-{n} from the top; its ID is {n} * (row - 1) + column, "
        "a being column 0. Each drawn row is shifted to the right. A cell touches its left and right neighbours, the "
        "same letter and the next letter in the row above, the same letter and the previous letter in the row below: "
        "b2 touches a2, c2, b1, c1, a3 and b3."
    )


def board_rows(state: State) -> list[str]:
    """The board's rows from the top, a character a cell."""
    return [line.replace(" ", "") for line in str(state).splitlines() if line.strip()]


def _describe(state: State, seat: int) -> str:
    rows = board_rows(state)
    header = "   " + " ".join(chr(ord("a") + i) for i in range(len(rows)))
    drawn = [f"{' ' * i}{i + 1:>2} {' '.join(row)}" for i, row in enumerate(rows)]
    goal = ("top to bottom", "left to right")[seat]
    return "\n".join([f"You play {'xo'[seat]} and connect {goal}.", header, *drawn])


def _compact(state: State, seat: int) -> str:
    """Own direction (v top to bottom, h left to right), then the rows; x is always the player in ``seat``."""
    board = "/".join(board_rows(state))
    return f"{'vh'[seat]} {board if seat == 0 else board.translate(SWAP)}"


GAME = Game(
    name="hex",
    params=lambda config_id: {"board_size": 5 + 2 * (config_id % 4)},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(1000, 50),
    history_turns=0,
)
