"""Phantom tic-tac-toe: the opponent's marks are invisible until you bump into them."""

from games.base import Game, Params, State, rules_text


def _rules(params: Params) -> str:
    told = {
        "reveal-nothing": "You are not told how often the opponent has tried.",
        "reveal-numturns": "You are told how many attempts both players have made, failed ones included.",
    }[params["obstype"]]
    return rules_text("phantom_ttt", told=told)


def _view(state: State, seat: int) -> tuple[str, list[str]]:
    """Return the seat's view of the board (three rows) and the attempts it knows of: a cell, ? for the opponent's."""
    lines = state.information_state_string(seat).splitlines()
    attempts = lines[-1].split() if len(lines) > 3 else []
    return "\n".join(lines[:3]), [attempt.split(",")[1] for attempt in attempts if "," in attempt]


def _describe(state: State, seat: int) -> str:
    board, attempts = _view(state, seat)
    words = ["opponent" if attempt == "?" else f"you {attempt}" for attempt in attempts]
    return f"You are {'xo'[seat]}. Your view:\n{board}\nAttempts you know of: {', '.join(words) or 'none'}."


def _compact(state: State, seat: int) -> str:
    board, attempts = _view(state, seat)
    return f"{'xo'[seat]} {board.replace(chr(10), '/')} {''.join(attempts)}".rstrip()


GAME = Game(
    name="phantom_ttt",
    params=lambda c: {"obstype": "reveal-nothing" if c % 2 == 0 else "reveal-numturns"},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(3000, 150),
    compact_actions=False,
)
