"""Kuhn poker: three cards, one bet, two players."""

from games.base import Game, State, rules_text

RANKS = ("Jack", "Queen", "King")
WORDS = {"p": "Pass", "b": "Bet"}


def _describe(state: State, seat: int) -> str:
    card, *bets = state.information_state_string(seat)
    moves = [f"{'you' if i % 2 == seat else 'opponent'} {WORDS[b]}" for i, b in enumerate(bets)]
    pot = 2 + bets.count("b")
    return f"Your card: {RANKS[int(card)]}\nBetting so far: {', '.join(moves) or 'none'}\nPot: {pot} chips"


def _compact(state: State, seat: int) -> str:
    card, *bets = state.information_state_string(seat)
    return f"{RANKS[int(card)][0]} {''.join(bets)}".rstrip()


GAME = Game(
    name="kuhn_poker",
    rules=lambda params: rules_text("kuhn_poker"),
    describe=_describe,
    compact=_compact,
    mcts=(1000, 50),
    compact_actions=False,
    dealt=lambda card: RANKS[card],
)
