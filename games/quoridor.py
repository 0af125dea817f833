"""Quoridor for two on 7x7 and 9x9."""

import re

from games.base import Game, Params, State, rules_text


def _rules(params: Params) -> str:
    size = params["board_size"]
    return rules_text("quoridor", **params, last="abcdefghi"[size - 1], limit=4 * size * size)


def _pawns_and_walls(state: State) -> tuple[dict[str, str], list[str]]:
    """Return each pawn's square by its symbol, and the walls that players 0 and 1 have left, from the drawing."""
    lines = str(state).splitlines()
    pawns = {}
    for line in lines[2:]:
        for symbol in "0@":
            column = line.find(symbol, 3)  # skips the row label, in which a 0 may occur
            if column >= 0:
                pawns[symbol] = f"{'abcdefghi'[(column - 3) // 4]}{int(line[:2])}"
    return pawns, re.findall(r"\d+", lines[0])[1:]


def _turns(state: State) -> tuple[int, int]:
    """Return the turns played and the limit on them; the drawing's first number is the board's size."""
    return len(state.history()), 4 * int(re.findall(r"\d+", str(state))[0]) ** 2


def _describe(state: State, seat: int) -> str:
    drawing = [line.rstrip() for line in str(state).splitlines()[1:] if line.strip()]
    _, walls = _pawns_and_walls(state)
    done, limit = _turns(state)
    goal = len([line for line in drawing if line[:2].strip()]) if seat == 1 else 1
    head = f"You are pawn {'0@'[seat]}; your goal is row {goal}."
    left = f"Walls left: you {walls[seat]}, opponent {walls[1 - seat]}. Turns played: {done} of at most {limit}."
    return "\n".join([head, *drawing, left])


def _compact(state: State, seat: int) -> str:
    """Own pawn; own and the opponent's square; their walls left; turns left; walls on the board."""
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
    compact_actions=False,
)
