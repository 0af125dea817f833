"""Dots and boxes with 3x3, 4x4 or 5x5 boxes."""

from games.base import Game, Params, State, rules_text, seen_from


def _rules(params: Params) -> str:
    rows, cols = params["num_rows"], params["num_cols"]
    draw = "equal numbers draw" if rows * cols % 2 == 0 else f"with {rows * cols} boxes there is no draw"
    ends = {"dot_rows": rows + 1, "dot_cols": cols + 1, "last_row": rows - 1, "last_col": cols - 1}
    return rules_text("dots_and_boxes", rows=rows, cols=cols, **ends, draw=draw, horizontal=(rows + 1) * cols)


def _grid(state: State) -> tuple[list[str], list[str], list[str]]:
    """Return the rows of horizontal lines, of vertical lines (1 drawn, 0 not) and of box owners (1, 2 or .)."""
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
    lines = "|".join("/".join(rows) for rows in (horizontal, vertical))
    return f"{lines}|{seen_from(seat, '/'.join(owners), '12')}"


GAME = Game(
    name="dots_and_boxes",
    params=lambda config_id: {"num_rows": 3 + config_id % 3, "num_cols": 3 + config_id % 3},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(1200, 100),
    history_turns=0,
    compact_actions=False,
)
