"""Blackjack, one player against a fixed dealer, one deck."""

from games.base import Game, State, rules_text


def _hands(state: State) -> tuple[list[str], list[str]]:
    """Return the player's cards and the dealer's visible ones (the observation shows the hidden card as ??)."""
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
    rules=lambda params: rules_text("blackjack"),
    describe=_describe,
    compact=_compact,
    compact_actions=False,
)
