"""Amazons; a turn is three actions: which amazon, where to, where the arrow goes."""

from __future__ import annotations

from typing import Any

from games.base import Game, State


def _rules(params: dict[str, Any]) -> str:
    size = params["board_size"]
    return f"""Amazons on a {size}x{size} board. X and O have four amazons each; X moves first. Who cannot move on \
their turn loses.
- A turn has three parts, each an action of its own: "X From (r, c)" picks one of your amazons, "X To (r, c)" moves \
it, "X Shoot: (r, c)" shoots an arrow from its new square.
- Amazons and arrows go any distance in a straight line, horizontal, vertical or diagonal, over empty squares only. \
The arrow may go to or through the square the amazon has just left.
- A square hit by an arrow (#) stays blocked for both sides.
- Squares are (row, column): rows 1-{size} from the top, columns 1-{size} from the left."""


def _square(cell: int, size: int) -> str:
    return f"({cell // size + 1}, {cell % size + 1})"


def _describe(state: State, seat: int) -> str:
    rows = str(state).split()
    size, history = len(rows), state.history()
    part = len(history) % 3
    now = "Pick the amazon to move."
    if part == 1:
        now = f"The amazon of {_square(history[-1], size)} is lifted off: choose its new square."
    if part == 2:
        now = f"The amazon now on {_square(history[-1], size)} shoots: choose the arrow's square."
    lines = [f"You are {'XO'[seat]}.", "   " + "".join(f"{column:3}" for column in range(1, size + 1))]
    lines += [f"{number:3}" + "".join(f"{cell:>3}" for cell in row) for number, row in enumerate(rows, 1)]
    return "\n".join([*lines, now])


def _compact(state: State, seat: int) -> str:
    """Rows from the top, x mine, o theirs; then f (from), t<id> (to, from that cell) or s<id> (shoot from there)."""
    rows, history = str(state).split(), state.history()
    mine, theirs = "XO" if seat == 0 else "OX"
    board = "/".join(rows).translate(str.maketrans(mine + theirs, "xo"))
    part = len(history) % 3
    return f"{board} {'fts'[part]}{history[-1] if part else ''}"


GAME = Game(
    name="amazons",
    params=lambda c: {"board_size": (6, 8, 10)[c % 3]},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(200, 20),
    history_turns=0,
    compact_actions=False,
)
