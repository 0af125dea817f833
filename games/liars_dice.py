"""Liar's dice with five dice a player."""

from games.base import Game, Params, State, rules_text

FACES, QUANTITIES = "abcdef", "ABCDEFGHIJ"


def _rules(params: Params) -> str:
    dice = params["numdice"]
    return rules_text("liars_dice", dice=dice, die="die" if dice == 1 else "dice", most=2 * dice, liar=12 * dice)


def _describe(state: State, seat: int) -> str:
    dice, *bids = state.information_state_string(seat).split()
    made = [f"{'you' if i % 2 == seat else 'opponent'} {bid}" for i, bid in enumerate(bids)]
    return f"Your dice: {' '.join(dice)}\nBids so far: {', '.join(made) or 'none'}"


def _compact(state: State, seat: int) -> str:
    """Own dice, then the bids, the latest first; faces are a to f, quantities A to J (Da: four dice of face 1)."""
    dice, *bids = state.information_state_string(seat).split()
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
