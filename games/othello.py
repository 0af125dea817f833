"""Othello on the usual 8x8 board."""

from __future__ import annotations

from typing import Any

from games.base import Game, State

SWAP = str.maketrans("xo", "ox")


def _rules(params: dict[str, Any]) -> str:
    return (
        "Othello on an 8x8 board. Player 0 plays x (Black) and moves first, Player 1 plays o (White). A move puts a "
        "disc on an empty cell so that at least one straight line (horizontal, vertical or diagonal) of opposing "
        "discs lies between the new disc and another own disc; all discs so enclosed turn over. A player without such "
        "a move must pass. When neither player can move the game ends: more own discs win, equal numbers draw.\n"
        "A cell is named column letter a-h, row number 1-8 from the top; its ID is 8 * (row - 1) + column, a being "
        "column 0. ID 64 is pass. On the board - is an empty cell."
    )


def _rows(state: State) -> list[str]:
    lines = [line.split() for line in str(state).splitlines()]
    return ["".join(words[1:9]) for words in lines if words and words[0].isdigit()]


def _describe(state: State, seat: int) -> str:
    rows = _rows(state)
    board = [f"{i + 1} {' '.join(row)}" for i, row in enumerate(rows)]
    own, other = ("".join(rows).count(mark) for mark in ("xo", "ox")[seat])
    return "\n".join([f"You play {'xo'[seat]}. Discs: you {own}, opponent {other}.", "  a b c d e f g h", *board])


def _compact(state: State, seat: int) -> str:
    """The rows from the top; x is always the player in ``seat``."""
    board = "/".join(_rows(state)).replace("-", ".")
    return board if seat == 0 else board.translate(SWAP)


GAME = Game(
    name="othello",
    params=lambda config_id: {},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(1000, 20),
    history_turns=0,
)
