"""Amazons. A turn is three actions: which amazon, where it goes, where its arrow goes."""

from games.base import Game, State, rules_text, seen_from


def _describe(state: State, seat: int) -> str:
    rows = str(state).split()
    size, history = len(rows), state.history()
    last = f"({history[-1] // size + 1}, {history[-1] % size + 1})" if history else ""
    asked = (
        "Pick the amazon to move.",
        f"The amazon of {last} is lifted off: choose its new square.",
        f"The amazon now on {last} shoots: choose the arrow's square.",
    )[len(history) % 3]
    lines = [f"You are {'XO'[seat]}.", "   " + "".join(f"{column:3}" for column in range(1, size + 1))]
    lines += [f"{number:3}" + "".join(f"{cell:>3}" for cell in row) for number, row in enumerate(rows, 1)]
    return "\n".join([*lines, asked])


def _compact(state: State, seat: int) -> str:
    """Rows from the top, x mine, o theirs; then f (from), t<id> (to, from that cell) or s<id> (shoot from there)."""
    rows, history = str(state).split(), state.history()
    part = len(history) % 3
    return f"{seen_from(seat, '/'.join(rows), 'XO')} {'fts'[part]}{history[-1] if part else ''}"


GAME = Game(
    name="amazons",
    params=lambda c: {"board_size": (6, 8, 10)[c % 3]},
    rules=lambda params: rules_text("amazons", **params),
    describe=_describe,
    compact=_compact,
    mcts=(200, 20),
    history_turns=0,
    compact_actions=False,
)
