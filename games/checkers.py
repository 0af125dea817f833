"""Checkers (English draughts) on 8x8."""

from itertools import takewhile

from games.base import Game, State, rules_text

_DRAW_AFTER = 40  # moves in a row, of both sides together, without a capture


def _view(state: State, seat: int) -> tuple[list[str], int, str]:
    """Return the rows (the top one first), the moves since a capture, and where the seat's own piece moved last.

    The latter is "" unless the seat moved last: then that piece must go on capturing.
    """
    rows = [line[1:] for line in str(state).splitlines()[:8]]
    moves = [(item.player, state.action_to_string(item.player, item.action)) for item in state.full_history()]
    quiet = takewhile(lambda move: abs(ord(move[1][0]) - ord(move[1][2])) < 2, reversed(moves))
    return rows, len(list(quiet)), moves[-1][1][2:] if moves and moves[-1][0] == seat else ""


def _describe(state: State, seat: int) -> str:
    rows, quiet, jumper = _view(state, seat)
    lines = ["You are o (kings 8), going up." if seat == 0 else "You are + (kings *), going down."]
    lines += [f"{8 - i} {' '.join(row)}" for i, row in enumerate(rows)]
    lines += ["  a b c d e f g h", f"Moves without a capture: {quiet} of {_DRAW_AFTER}."]
    if state.current_player() == seat and jumper:
        lines.append(f"Your piece on {jumper} must go on capturing.")
    return "\n".join(lines)


def _compact(state: State, seat: int) -> str:
    rows, quiet, jumper = _view(state, seat)
    return f"{'o+'[seat]} {'/'.join(rows)} {quiet} {jumper}".rstrip()


GAME = Game(
    name="checkers",
    rules=lambda params: rules_text("checkers", draw_after=_DRAW_AFTER),
    describe=_describe,
    compact=_compact,
    mcts=(500, 50),
    history_turns=0,
)
