"""Tic-tac-toe."""

from games.base import Game, State, rules_text, signed


def _describe(state: State, seat: int) -> str:
    rows = [f"{r} {' '.join(row)}" for r, row in enumerate(str(state).split())]
    return "\n".join([f"You play {'xo'[seat]}.", "  0 1 2", *rows])


def _compact(state: State, seat: int) -> str:
    """Each mark with its cell, a to i row by row; a dot for an empty board."""
    cells = zip("".join(str(state).split()), "abcdefghi", strict=True)
    return "".join(signed(mark, seat, cell) for mark, cell in cells if mark != ".") or "."


GAME = Game(
    name="tic_tac_toe",
    rules=lambda params: rules_text("tic_tac_toe"),
    describe=_describe,
    compact=_compact,
    mcts=(1000, 20),
    compact_actions=False,
)
