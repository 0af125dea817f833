"""Connect four on the usual 6x7 board."""

from games.base import Game, State, rules_text, signed


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
    rules=lambda params: rules_text("connect_four"),
    describe=_describe,
    compact=_compact,
    mcts=(1000, 20),
    compact_actions=False,
)
