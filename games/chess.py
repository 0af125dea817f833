"""Chess. A position is shown as its FEN."""

from games.base import Game, State, rules_text


# A FEN does not say how often a position has occurred, so the model cannot see a threefold repetition coming.
def _describe(state: State, seat: int) -> str:
    fen = str(state)
    lines = ["You are White." if seat == 1 else "You are Black."]
    for number, row in zip(range(8, 0, -1), fen.split()[0].split("/"), strict=True):
        squares = "".join("." * int(piece) if piece.isdigit() else piece for piece in row)
        lines.append(f"{number} {' '.join(squares)}")
    return "\n".join([*lines, "  a b c d e f g h", f"FEN: {fen}"])


GAME = Game(
    name="chess",
    rules=lambda params: rules_text("chess"),
    describe=_describe,
    compact=lambda state, seat: str(state),
    mcts=(200, 20),
    history_turns=0,
)
