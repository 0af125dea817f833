"""Dots and boxes with 3x3, 4x4 or 5x5 boxes."""

from __future__ import annotations

from typing import Any

from games.base import Game, State


def _rules(params: dict[str, Any]) -> str:
    rows, cols = params.get("num_rows", 2), params.get("num_cols", 2)
    horizontal = (rows + 1) * cols
    draw = "equal numbers draw" if rows * cols % 2 == 0 else f"with {rows * cols} boxes there is no draw"
    return (
        f"Dots and boxes with {rows}x{cols} boxes, that is {rows + 1}x{cols + 1} dots. Player 0 begins. A move draws "
        "one missing line between two neighbouring dots. Who draws the last side of a box owns the box and must move "
        f"again; otherwise the turn passes. When all lines are drawn, more own boxes win; {draw}.\n"
        f"h,r,c is the horizontal line number c (0-{cols - 1} from the left) in dot row r (0-{rows} from the top), the "
        f"top side of box row r, column c; its ID is {cols} * r + c. v,r,c is the vertical line in box row r "
        f"(0-{rows - 1}) and dot column c (0-{cols}), the left side of box row r, column c; its ID is {horizontal} + "
        f"{cols + 1} * r + c. P1(...) is a move of Player 0, P2(...) one of Player 1."
    )


def _grid(state: State) -> tuple[list[str], list[str], list[str]]:
    """Return rows of horizontal lines and of vertical lines (1 drawn, 0 not) and of box owners (1, 2 or .)."""
    lines = [line for line in str(state).splitlines() if line]
    horizontal = ["".join("01"[c == "─"] for c in line[2::4]) for line in lines[0::2]]
    vertical = ["".join("01"[c == "│"] for c in line[0::4]) for line in lines[1::2]]
    owners = [line[2::4].replace(" ", ".") for line in lines[1::2]]
    return horizontal, vertical, owners


def _describe(state: State, seat: int) -> str:
    horizontal, vertical, owners = _grid(state)
    marks = {str(seat + 1): "Y", str(2 - seat): "O", ".": " "}
    lines = []
    for r, row in enumerate(horizontal):
        lines.append("+" + "+".join("---" if c == "1" else "   " for c in row) + f"+  h,{r}")
        if r < len(vertical):
            walls = ["|" if c == "1" else " " for c in vertical[r]]
            boxes = [f"{wall} {marks[o]} " for wall, o in zip(walls, owners[r], strict=False)]
            lines.append("".join(boxes) + walls[-1] + f"  v,{r}")
    own, other = ("".join(owners).count(str(p + 1)) for p in (seat, 1 - seat))
    head = f"Boxes: you {own}, opponent {other}. In a box Y is you, O the opponent."
    return "\n".join([head, *lines])


def _compact(state: State, seat: int) -> str:
    """Horizontal lines, vertical lines (1 drawn), then box owners; x is always the player in ``seat``."""
    horizontal, vertical, owners = _grid(state)
    marks = str.maketrans("12", "xo" if seat == 0 else "ox")
    return "|".join("/".join(rows) for rows in (horizontal, vertical, [o.translate(marks) for o in owners]))


GAME = Game(
    name="dots_and_boxes",
    params=lambda config_id: {"num_rows": 3 + config_id % 3, "num_cols": 3 + config_id % 3},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(1200, 100),
    history_turns=0,
)
