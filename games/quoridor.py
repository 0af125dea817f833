"""Quoridor for two on 7x7 and 9x9."""

import re

from games.base import Game, Params, State, rules_text


def _rules(params: Params) -> str:
    size = params["board_size"]
    return rules_text("quoridor", **params, last="abcdefghi"[size - 1], limit=4 * size * size)


def _view(state: State) -> tuple[int, dict[str, str], list[str], int]:
    """Return the board's size, each pawn's square by its symbol, walls left to players 0 and 1, and turns played."""
    lines = str(state).splitlines()
    size, *walls = re.findall(r"\d+", lines[0])
    pawns = {}
    for line in lines[2:]:
        for symbol in "0@":
            column = line.find(symbol, 3)  # skips the row label, in which a 0 may occur
            if column >= 0:
                pawns[symbol] = f"{'abcdefghi'[(column - 3) // 4]}{int(line[:2])}"
    return int(size), pawns, walls, len(state.history())


def _describe(state: State, seat: int) -> str:
    drawing = [line.rstrip() for line in str(state).splitlines()[1:] if line.strip()]
    size, _, walls, done = _view(state)
    head = f"You are pawn {'0@'[seat]}; your goal is row {(1, size)[seat]}."
    left = f"Walls left: you {walls[seat]}, opponent {walls[1 - seat]}. Turns played: {done} of at most {4 * size**2}."
    return "\n".join([head, *drawing, left])


def _compact(state: State, seat: int) -> str:
    """Own pawn; own and the opponent's square; their walls left; turns left; walls on the board."""
    size, pawns, walls, done = _view(state)
    me, them = "0@"[seat], "@0"[seat]
    names = (state.action_to_string(item.player, item.action) for item in state.full_history())
    placed = sorted(name for name in names if name[-1] in "vh")
    head = f"{me} {pawns[me]} {pawns[them]} {walls[seat]} {walls[1 - seat]} {4 * size**2 - done}"
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
