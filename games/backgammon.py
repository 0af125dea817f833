"""Backgammon without doubling cube."""

import re

from games.base import Game, State, rules_text

POINTS = 24


def _field(state: State, key: str) -> str:
    return next(line for line in str(state).splitlines() if line.startswith(key)).partition(":")[2].strip()


def _view(state: State, seat: int) -> tuple[str, list[list[int]], list[int], list[int]]:
    """Return the dice (+: second action of a double), and points, bar and borne off of (seat, opponent)."""
    players, bar = (seat, 1 - seat), _field(state, "Bar")
    off = [int(count) for count in re.findall(r"\d+", _field(state, "Scores"))]
    dice = _field(state, "Dice") + ("+" if _field(state, "Extra turn") == "1" else "")
    order = range(POINTS - 1, -1, -1) if seat == 0 else range(POINTS)  # the engine begins at o's point 1
    points = [[state.board(p, i) for i in order] for p in players]
    return dice, points, [bar.count("xo"[p]) for p in players], [off[p] for p in players]


def _describe(state: State, seat: int) -> str:
    dice, points, bar, off = _view(state, seat)
    second = " (second action of a double)" if "+" in dice else ""
    lines = [f"You play {'xo'[seat]}. Dice: {' '.join(dice[:2])}{second}"]
    for i, name in enumerate(("Your", "Opponent's")):
        placed = [f"{p}:{points[i][p - 1]}" for p in range(POINTS, 0, -1) if points[i][p - 1]]
        lines.append(f"{name} checkers (your point:count): {' '.join(placed) or 'none'}")
        lines.append(f"{name} checkers on the bar: {bar[i]}, borne off: {off[i]}")
    return "\n".join(lines)


def _compact(state: State, seat: int) -> str:
    """Dice (+: second action of a double), points 24 to 1 (own counts A-O, the opponent's a-o), bars, borne off."""
    dice, (own, other), bar, off = _view(state, seat)
    cells = [chr(64 + a) if a else chr(96 + b) if b else "." for a, b in zip(own, other, strict=True)]
    return f"{dice} {''.join(reversed(cells))} {bar[0]}-{bar[1]} {off[0]}-{off[1]}"


GAME = Game(
    name="backgammon",
    rules=lambda params: rules_text("backgammon"),
    describe=_describe,
    compact=_compact,
    mcts=(600, 15),
    history_turns=0,
)
