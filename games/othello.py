"""Othello on the usual 8x8 board."""

from games.base import Game, State, rules_text, seen_from


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
    return seen_from(seat, "/".join(_rows(state)).replace("-", "."), "xo")


GAME = Game(
    name="othello",
    rules=lambda params: rules_text("othello"),
    describe=_describe,
    compact=_compact,
    mcts=(1000, 20),
    history_turns=0,
)
