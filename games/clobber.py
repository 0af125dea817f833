"""Clobber on square boards of 5, 6 and 7."""

from games.base import Game, State, rules_text, seen_from


def _rows(state: State) -> list[str]:
    return [line[1:] for line in str(state).splitlines() if line[:1].isdigit()]


def _describe(state: State, seat: int) -> str:
    rows = _rows(state)
    board = [f"{len(rows) - i} {' '.join(row)}" for i, row in enumerate(rows)]
    columns = " ".join(chr(ord("a") + i) for i in range(len(rows[0])))
    return "\n".join([f"You play {'ox'[seat]}.", *board, f"  {columns}"])


def _compact(state: State, seat: int) -> str:
    """The rows from the top; x is always the player in ``seat``."""
    return seen_from(seat, "/".join(_rows(state)), "ox")


GAME = Game(
    name="clobber",
    params=lambda config_id: {"rows": 5 + config_id % 3, "columns": 5 + config_id % 3},
    rules=lambda params: rules_text("clobber", **params, last=chr(ord("a") + params["columns"] - 1)),
    describe=_describe,
    compact=_compact,
    mcts=(1500, 100),
    compact_actions=False,
)
