"""Backgammon without doubling cube."""

from __future__ import annotations

import re
from typing import Any

from games.base import Game, State

POINTS = 24


def _rules(params: dict[str, Any]) -> str:
    return (
        "Backgammon, one game, no doubling cube; a win counts 1 however large. Player 0 is x, Player 1 is o. Each "
        "player counts the 24 points in the own direction: your checkers move from 24 down to 1, points 6 to 1 are "
        "your home, and your point p is the opponent's point 25 - p. An opening roll decides who starts, with that "
        "roll.\n"
        "Each number rolled moves one checker that many points; one checker may use both numbers. A point with two or "
        "more opposing checkers is closed; a single opposing checker is hit and goes to the bar. Checkers on the bar "
        "must enter first: a rolled number n enters on your point 25 - n. With all your checkers in your home you may "
        "bear them off. A double is played as four moves of its number: two in one action, two in a second action. "
        "First to bear off all 15 checkers wins.\n"
        "Action names start with their ID. 13/7 moves a checker from your point 13 to 7, 24/18/14 moves one twice, "
        "8/4(2) two checkers alike, * marks a hit, Bar/20 enters, 6/Off bears off, Pass uses no number. Only playable "
        "moves are listed; the same play may be listed twice."
    )


def _points(state: State, player: int, seat: int) -> list[int]:
    """Return the player's checkers on points 1 to 24 in the numbering of ``seat``."""
    counts = [state.board(player, i) for i in range(POINTS)]  # o's point 1 comes first
    return counts[::-1] if seat == 0 else counts


def _field(state: State, key: str) -> str:
    """Return the value of a line of the engine's text."""
    return next(line for line in str(state).splitlines() if line.startswith(key)).partition(":")[2].strip()


def _view(state: State, seat: int) -> tuple[str, list[list[int]], list[int], list[int]]:
    """Return the dice (+ in the second action of a double), points, bar and borne off of (seat, opponent)."""
    bar, scores = _field(state, "Bar"), _field(state, "Scores")
    off = [int(count) for count in re.findall(r"\d+", scores)]
    dice = _field(state, "Dice") + ("+" if _field(state, "Extra turn") == "1" else "")
    players = (seat, 1 - seat)
    return (
        dice,
        [_points(state, p, seat) for p in players],
        [bar.count("xo"[p]) for p in players],
        [off[p] for p in players],
    )


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
    params=lambda config_id: {},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(600, 15),
    history_turns=0,
)
