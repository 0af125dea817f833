"""Quoridor for two on 7x7 and 9x9."""

from __future__ import annotations

import re
from typing import Any

from games.base import Game, State


def _rules(params: dict[str, Any]) -> str:
    size, walls = params["board_size"], params["wall_count"]
    last = "abcdefghi"[size - 1]
    return f"""Quoridor on a {size}x{size} board. Be the first to bring your pawn to the far side.
- Pawn 0 starts in the middle of row {size} (bottom), moves first and must reach row 1; pawn @ starts in the middle of \
row 1 (top) and must reach row {size}. Columns are a-{last} from the left, rows 1-{size} from the top.
- A turn either moves your pawn one square up, down, left or right, or places one of your {walls} walls.
- If the opponent's pawn is next to yours you may jump over it. If a wall or the board's edge is right behind it, you \
may step instead to a square beside that pawn, left or right of the jump.
- A wall is two squares long and blocks both pawns. Walls may not overlap or cross, nor cut off the last way of either \
pawn to its goal row.
- After {4 * size * size} turns the game is a draw.
- Action names: "c3" moves your pawn to c3; "c3v" is a vertical wall to the right of c3 and c4; "c3h" is a horizontal \
wall below c3 and d3. In the drawing | and --- are walls."""


def _pawns_and_walls(state: State) -> tuple[dict[str, str], list[str]]:
    """Square of each pawn symbol, and the walls left of players 0 and 1, read from the engine's drawing."""
    lines = str(state).splitlines()
    pawns = {}
    for line in lines[2:]:
        for symbol in "0@":
            column = line.find(symbol, 3)  # the row label, which may be a 0, lies before
            if column >= 0:
                pawns[symbol] = f"{'abcdefghi'[(column - 3) // 4]}{int(line[:2])}"
    return pawns, re.findall(r"\d+", lines[0])[1:]


def _turns(state: State) -> tuple[int, int]:
    return len(state.history()), 4 * int(re.findall(r"\d+", str(state))[0]) ** 2


def _describe(state: State, seat: int) -> str:
    drawing = [line.rstrip() for line in str(state).rstrip().splitlines()[1:]]
    _, walls = _pawns_and_walls(state)
    done, limit = _turns(state)
    goal = len([line for line in drawing if line[:2].strip()]) if seat == 1 else 1
    return "\n".join(
        [
            f"You are pawn {'0@'[seat]}; your goal is row {goal}.",
            *(line for line in drawing if line),
            f"Walls left: you {walls[seat]}, opponent {walls[1 - seat]}. Turns played: {done} of at most {limit}.",
        ]
    )


def _compact(state: State, seat: int) -> str:
    """Who I am, my and their square, walls left, turns left, walls on the board."""
    pawns, left = _pawns_and_walls(state)
    me, them = "0@"[seat], "@0"[seat]
    names = (state.action_to_string(item.player, item.action) for item in state.full_history())
    placed = sorted(name for name in names if name[-1] in "vh")
    done, limit = _turns(state)
    head = f"{me} {pawns[me]} {pawns[them]} {left[seat]} {left[1 - seat]} {limit - done}"
    return " ".join([head, *placed])


GAME = Game(
    name="quoridor",
    params=lambda c: {"board_size": 7 + 2 * ((c // 2) % 2), "wall_count": 8 + 2 * (c % 2)},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(800, 80),
    history_turns=0,
)
