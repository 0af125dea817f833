"""Hex on boards of 5, 7, 9 and 11."""

from games.base import Game, State, rules_text, seen_from


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
    return f"{'vh'[seat]} {seen_from(seat, '/'.join(board_rows(state)), 'xo')}"


GAME = Game(
    name="hex",
    params=lambda config_id: {"board_size": 5 + 2 * (config_id % 4)},
    rules=lambda params: rules_text("hex", **params, last=chr(ord("a") + params["board_size"] - 1)),
    describe=_describe,
    compact=_compact,
    mcts=(1000, 50),
    history_turns=0,
)
