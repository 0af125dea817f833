"""Liar's dice with five dice a player."""

from __future__ import annotations

from typing import Any

from games.base import Game, State

FACES, QUANTITIES = "abcdef", "ABCDEFGHIJ"


def _rules(params: dict[str, Any]) -> str:
    dice = params.get("numdice", 1)
    liar = 12 * dice
    return (
        f"Liar's dice for two players with {dice} six-sided {'die' if dice == 1 else 'dice'} each; you see only your "
        "own. Player 0 starts, then the players take turns.\n"
        "A bid quantity-face, such as 1-5, claims that among the dice of both players together at least quantity show "
        "that face. Sixes are wild: they count as every face. A new bid must be higher than the last: a larger "
        "quantity with any face, or the same quantity with a higher face. Instead of bidding you may call Liar, but "
        "not as the first move. Then all dice are shown: if the last bid is true, its bidder wins, otherwise the "
        "caller wins.\n"
        f"The ID of a bid is 6 * (quantity - 1) + (face - 1), quantity from 1 to {2 * dice}; Liar is ID {liar}."
    )


def _view(state: State, seat: int) -> tuple[str, list[str]]:
    """Return the seat's own dice in ascending order and the bids from first to last."""
    dice, *bids = state.information_state_string(seat).split()
    return dice, bids


def _describe(state: State, seat: int) -> str:
    dice, bids = _view(state, seat)
    made = [f"{'you' if i % 2 == seat else 'opponent'} {bid}" for i, bid in enumerate(bids)]
    return f"Your dice: {' '.join(dice)}\nBids so far: {', '.join(made) or 'none'}"


def _compact(state: State, seat: int) -> str:
    """Own dice, then the bids, the latest first; faces are a to f, quantities A to J (Da: four dice of face 1)."""
    dice, bids = _view(state, seat)
    pairs = [tuple(map(int, bid.split("-"))) for bid in reversed(bids)]
    own = "".join(FACES[int(face) - 1] for face in dice)
    return " ".join([own, *(QUANTITIES[quantity - 1] + FACES[face - 1] for quantity, face in pairs)])


GAME = Game(
    name="liars_dice",
    params=lambda config_id: {"players": 2, "numdice": 5},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(3000, 200),
    compact_actions=False,
)
