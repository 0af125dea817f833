"""Go on 5x5 and 7x7 boards under area scoring."""

from __future__ import annotations

from typing import Any

from games.base import Game, State


def _rules(params: dict[str, Any]) -> str:
    size = params["board_size"]
    columns = f"a-{'abcdefghjklmnopqrst'[size - 1]}"
    return f"""Go on a {size}x{size} board. Black (X) plays first, then White (O), in turn.
- A turn places one stone on an empty point, or passes. Points are column letter + row number: columns {columns} from \
the left, rows 1-{size} from the bottom.
- Stones of one colour joined along lines form a group; its liberties are the empty points beside it. A group without \
liberties is captured and removed. You may not leave your own group without liberties, nor retake a ko at once.
- The game ends after two passes in a row, or after {2 * size * size} turns. A stone that brings back an earlier \
position of the whole board ends it at once as a draw.
- Area scoring: each side counts its stones plus the empty points that only its stones surround. No stone is taken off \
as dead: capture it before the end. White gets {params["komi"]} points on top. More points win.
- Action names: "B c3" is a black stone on c3, "W PASS" is White passing."""


def _rows(state: State) -> list[str]:
    """Board rows, top row first, of the characters + X O."""
    return [line[3:] for line in str(state).splitlines()[2:] if line[:2].strip()]


def _ply(state: State) -> tuple[int, int]:
    return len(state.history()), 2 * len(_rows(state)) ** 2


def _passed(state: State) -> bool:
    return bool(state.history()) and state.history()[-1] == len(_rows(state)) ** 2


# Which earlier positions occurred is left out: a ko shows in the legal actions, and only a longer repetition needs it.
def _describe(state: State, seat: int) -> str:
    done, limit = _ply(state)
    lines = ["You are Black (X)." if seat == 0 else "You are White (O)."]
    lines += str(state).rstrip().splitlines()[2:]
    lines.append(f"Turns played: {done} of at most {limit}.")
    if _passed(state):
        lines.append("The last turn was a pass: another pass ends the game.")
    return "\n".join(lines)


def _compact(state: State, seat: int) -> str:
    """Rows from the bottom (so that cells come in the order of the action ids), x mine, o theirs."""
    mine, theirs = "XO" if seat == 0 else "OX"
    board = "/".join(reversed(_rows(state))).translate(str.maketrans(mine + theirs + "+", "xo."))
    done, limit = _ply(state)
    return f"{board} {'BW'[seat]} {limit - done}{' p' if _passed(state) else ''}"


GAME = Game(
    name="go",
    params=lambda c: {"board_size": 5 + 2 * (c % 2), "komi": 7.5},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(300, 30),
    history_turns=0,
)
