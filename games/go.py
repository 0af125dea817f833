"""Go on 5x5 and 7x7 boards under area scoring."""

from games.base import Game, Params, State, rules_text, seen_from


def _rules(params: Params) -> str:
    size = params["board_size"]
    return rules_text("go", **params, columns=f"a-{'abcdefghjklmnopqrst'[size - 1]}", limit=2 * size * size)


def _view(state: State) -> tuple[list[str], int, int, bool]:
    """Return the rows in the characters + X O, the top one first; turns played, their limit, and if the last passed."""
    rows = [line[3:] for line in str(state).splitlines()[2:] if line[:2].strip()]
    history, cells = state.history(), len(rows) ** 2
    return rows, len(history), 2 * cells, history[-1:] == [cells]


# Earlier positions are left out: a ko shows in the legal actions, and only longer repetitions would need them.
def _describe(state: State, seat: int) -> str:
    _, done, limit, passed = _view(state)
    lines = ["You are Black (X)." if seat == 0 else "You are White (O)."]
    lines += str(state).rstrip().splitlines()[2:]
    lines.append(f"Turns played: {done} of at most {limit}.")
    if passed:
        lines.append("The last turn was a pass: another pass ends the game.")
    return "\n".join(lines)


def _compact(state: State, seat: int) -> str:
    """Rows from the bottom up (the order of the action ids), x mine, o theirs; color; turns left; p after a pass."""
    rows, done, limit, passed = _view(state)
    board = seen_from(seat, "/".join(reversed(rows)), "XO").replace("+", ".")
    return f"{board} {'BW'[seat]} {limit - done}{' p' if passed else ''}"


GAME = Game(
    name="go",
    params=lambda c: {"board_size": 5 + 2 * (c % 2), "komi": 7.5},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(300, 30),
    history_turns=0,
)
