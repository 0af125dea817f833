"""Kuhn poker: three cards, one bet, two players."""

from games.base import Game, State, rules_text

RANKS = ("Jack", "Queen", "King")
WORDS = {"p": "Pass", "b": "Bet"}


def _view(state: State, seat: int) -> tuple[str, str]:
    """Return the rank of the seat's own card and the betting so far as letters."""
    view = state.information_state_string(seat)
    return RANKS[int(view[0])], view[1:]


def _describe(state: State, seat: int) -> str:
    rank, bets = _view(state, seat)
    moves = [f"{'you' if i % 2 == seat else 'opponent'} {WORDS[b]}" for i, b in enumerate(bets)]
    pot = 2 + bets.count("b")
    return f"Your card: {rank}\nBetting so far: {', '.join(moves) or 'none'}\nPot: {pot} chips"


def _compact(state: State, seat: int) -> str:
    rank, bets = _view(state, seat)
    return f"{rank[0]} {bets}".rstrip()


GAME = Game(
    name="kuhn_poker",
    rules=lambda params: rules_text("kuhn_poker"),
    describe=_describe,
    compact=_compact,
    mcts=(1000, 50),
    compact_actions=False,
    dealt=lambda card: RANKS[card],
)
