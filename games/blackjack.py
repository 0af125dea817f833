"""Blackjack, one player against a fixed dealer, one deck."""

from __future__ import annotations

from typing import Any

from games.base import Game, State


def _rules(params: dict[str, Any]) -> str:
    return """Blackjack against a dealer, one hand from one 52-card deck. Come closer to 21 than the dealer without \
going over.
- Number cards count their number, T (ten), J, Q and K count 10, an ace counts 1 or 11, whichever is better.
- You and the dealer get two cards each; one of the dealer's is face down.
- Hit takes another card: over 21 you lose at once. Stand ends your turn. There is no doubling or splitting.
- After you stand the dealer draws up to 16 and stops at 17 or more, counting an ace as 11 unless that goes over 21.
- If the dealer goes over 21 or has less than you, you win (+1); more, you lose (-1); the same, a tie (0). Two cards \
worth 21 earn nothing extra.
- Cards are suit then rank: C clubs, D diamonds, H hearts, S spades; "HT" is the ten of hearts."""


def _hands(state: State) -> tuple[list[str], list[str]]:
    """My cards and the dealer's visible ones, from the observation (the hidden card is ?? there)."""
    lines = state.observation_string(0).splitlines()
    mine, dealer = (line.split("Cards:")[1].split() for line in lines if "Cards:" in line)
    return mine, [card for card in dealer if card != "??"]


def _total(cards: list[str]) -> int:
    ranks = [card[1] for card in cards]
    total = sum(1 if rank == "A" else int(rank) if rank.isdigit() else 10 for rank in ranks)
    return total + 10 if "A" in ranks and total <= 11 else total


def _describe(state: State, seat: int) -> str:
    mine, dealer = _hands(state)
    return f"Your cards: {' '.join(mine)} (total {_total(mine)})\nDealer shows: {' '.join(dealer)}"


def _compact(state: State, seat: int) -> str:
    mine, dealer = _hands(state)
    return f"{' '.join(mine)}|{' '.join(dealer)}"


GAME = Game(
    name="blackjack",
    params=lambda c: {},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    compact_actions=False,
)
