"""Chess; a position is its FEN."""

from __future__ import annotations

from typing import Any

from games.base import Game, State


def _rules(params: dict[str, Any]) -> str:
    return """Chess, standard rules. Checkmate the opposing king to win.
- White's pieces are capital letters (K Q R B N P), Black's are small; White is at the bottom and moves first. \
Castling, en passant and promotion (to queen, rook, bishop or knight) are as usual.
- Draws: stalemate; too little material to mate; the same position for the third time; 50 moves by each side without a \
capture or a pawn move. Draws are automatic. Nobody resigns.
- Action names are algebraic: "Nf3", "exd5", "Rxa8+", "a8=Q", "O-O" (king's side), "O-O-O" (queen's side).
- The FEN line gives board, side to move, castling rights, en passant square, half-moves since the last capture or \
pawn move, move number."""


# How often a position has already occurred is not part of a FEN, so threefold repetition is out of view.
def _describe(state: State, seat: int) -> str:
    fen = str(state)
    lines = ["You are White." if seat == 1 else "You are Black."]
    for number, row in zip(range(8, 0, -1), fen.split()[0].split("/"), strict=True):
        squares = "".join("." * int(piece) if piece.isdigit() else piece for piece in row)
        lines.append(f"{number} {' '.join(squares)}")
    return "\n".join([*lines, "  a b c d e f g h", f"FEN: {fen}"])


def _compact(state: State, seat: int) -> str:
    return str(state)


GAME = Game(
    name="chess",
    params=lambda c: {},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(200, 20),
    history_turns=0,
)
