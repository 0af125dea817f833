"""Checkers (English draughts) on 8x8."""

from itertools import takewhile

from games.base import Game, State, rules_text

_DRAW_AFTER = 40  # moves in a row, of both sides together, without a capture


def _rows(state: State) -> list[str]:
    """Return the eight board rows without their labels, the top one first."""
    return [line[1:] for line in str(state).splitlines()[:8]]


def _moves(state: State) -> list[tuple[int, str]]:
    return [(item.player, state.action_to_string(item.player, item.action)) for item in state.full_history()]


def _moves_since_capture(moves: list[tuple[int, str]]) -> int:
    quiet = takewhile(lambda move: abs(ord(move[1][0]) - ord(move[1][2])) < 2, reversed(moves))
    return len(list(quiet))


def _jumper(moves: list[tuple[int, str]], seat: int) -> str:
    """Return the square of the piece that must go on capturing, "" if there is none."""
    return moves[-1][1][2:] if moves and moves[-1][0] == seat else ""


def _describe(state: State, seat: int) -> str:
    moves = _moves(state)
    lines = ["You are o (kings 8), going up." if seat == 0 else "You are + (kings *), going down."]
    lines += [f"{8 - i} {' '.join(row)}" for i, row in enumerate(_rows(state))]
    lines += ["  a b c d e f g h", f"Moves without a capture: {_moves_since_capture(moves)} of {_DRAW_AFTER}."]
    if state.current_player() == seat and _jumper(moves, seat):
        lines.append(f"Your piece on {_jumper(moves, seat)} must go on capturing.")
    return "\n".join(lines)


def _compact(state: State, seat: int) -> str:
    moves = _moves(state)
    rows = "/".join(_rows(state))
    return f"{'o+'[seat]} {rows} {_moves_since_capture(moves)} {_jumper(moves, seat)}".rstrip()


GAME = Game(
    name="checkers",
    rules=lambda params: rules_text("checkers", draw_after=_DRAW_AFTER),
    describe=_describe,
    compact=_compact,
    mcts=(500, 50),
    history_turns=0,
)
