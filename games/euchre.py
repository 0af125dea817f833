"""Euchre: two partnerships, 24 cards, one deal."""

from games.base import Game, Params, State, rules_text
from games.tricks import SEATS, Trick, parse_hand, parse_tricks

LONE_DEFENDER = (
    " Then the defenders are asked in turn, from the dealer's left, whether one of them defends alone; the first "
    "Alone settles it."
)
BIDS = {24: "Pass", 25: "Clubs", 26: "Diamonds", 27: "Hearts", 28: "Spades"}


def _rules(params: Params) -> str:
    alone = LONE_DEFENDER if params["allow_lone_defender"] else ""
    if params["stick_the_dealer"]:
        last = "If all others pass again the dealer must name a suit."
    else:
        last = "If all pass again the deal ends and nobody scores."
    return rules_text("euchre", last=last, alone=alone, lone=", 4 if a lone defender did it. " if alone else ". ")


def _card(card: int) -> str:
    return "CDHS"[card % 4] + "9TJQKA"[card // 4]


def _view(state: State, seat: int) -> tuple[list[str], str, list[tuple[int, str]], list[int], list[Trick]]:
    """Return hand, own discard as dealer ("": none), bids as (player, word), who plays alone, and tricks."""
    view, discard = state.information_state_string(seat), state.discard()
    hand = [suit + rank for suit, ranks in parse_hand(view).items() for rank in ranks]
    own_discard = _card(discard) if seat == state.dealer() and discard >= 0 else ""  # the engine's view leaves it out
    # Not from the engine's text, which may say "Pick up!" for a suit named in the second round.
    moves = [(item.player, item.action) for item in state.full_history()]
    bids = [(player, BIDS[action]) for player, action in moves if player >= 0 and action in BIDS]
    alone = [state.declarer()] if state.declarer_go_alone() else []
    alone += [p for p in range(4) if p == state.lone_defender()]
    return hand, own_discard, bids, alone, parse_tricks(view)


def _describe(state: State, seat: int) -> str:
    hand, discard, bids, alone, tricks = _view(state, seat)
    lines = [
        f"You are {SEATS[seat]}, your partner is {SEATS[(seat + 2) % 4]}. Dealer: {SEATS[state.dealer()]}",
        f"Upcard: {_card(state.upcard())}",
        f"Your hand: {' '.join(hand) or 'none'}",
    ]
    if discard:
        lines.append(f"You discarded {discard}")
    lines.append(f"Bidding: {', '.join(f'{SEATS[p]} {bid}' for p, bid in bids) or 'none yet'}")
    lines.append(f"Trump: {next((bid for _, bid in bids if bid != 'Pass'), 'not named yet')}")
    lines += [f"{SEATS[p]} plays alone." for p in alone]
    for number, trick in enumerate(tricks, start=1):
        lines.append(f"Trick {number}: " + ", ".join(f"{SEATS[p]} {card}" for p, card in trick))
    return "\n".join(lines)


def _compact(state: State, seat: int) -> str:
    """Dealer and upcard | hand | own discard | bids | lone players | tricks; seats count clockwise from one's own.

    Bids begin left of the dealer: P for a pass, or the suit named, which is trump. A trick ``1:DKDJ`` was led by the
    player one place to the left.
    """
    hand, discard, bids, alone, tricks = _view(state, seat)
    dealer = f"{(state.dealer() - seat) % 4}{_card(state.upcard())}"
    called, lone = "".join(bid[0] for _, bid in bids), "".join(str((p - seat) % 4) for p in alone)
    played = [f"{(t[0][0] - seat) % 4}:{''.join(card for _, card in t)}" for t in tricks]
    return "|".join([dealer, "".join(hand), discard, called, lone, " ".join(played)])


GAME = Game(
    name="euchre",
    params=lambda config_id: {"allow_lone_defender": bool(config_id & 1), "stick_the_dealer": bool(config_id & 2)},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(1000, 100),
)
