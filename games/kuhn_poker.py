"""Kuhn poker: three cards, one bet, two players."""

from __future__ import annotations

from typing import Any

from games.base import Game, State

RANKS = ("Jack", "Queen", "King")
WORDS = {"p": "Pass", "b": "Bet"}


def _rules(params: dict[str, Any]) -> str:
    return (
        "Kuhn poker for two players. The deck has three cards: Jack, Queen and King, King is highest. Both players "
        "put 1 chip into the pot and get one card that only they see; the third card is not used. Player 0 acts "
        "first.\n"
        "Pass (0) bets nothing; Bet (1) puts 1 more chip into the pot. After a Bet the other player answers: "
        "Pass gives up the pot, Bet matches the chip and the cards are shown. If both pass, the cards are shown "
        "too. If Player 0 passes and Player 1 bets, Player 0 answers that bet.\n"
        "The higher card wins what is in the pot. You win or lose 1 chip, or 2 chips when a bet was matched."
    )


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
    params=lambda config_id: {},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(1000, 50),
    compact_actions=False,
)
