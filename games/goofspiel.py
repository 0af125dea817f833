"""Goofspiel: bid cards for prizes, both players at once."""

import re

from games.base import Game, Params, State, rules_text

ORDER = {"random": "in random order", "descending": "from the highest to the lowest"}
WON, LOST, TIED = "+-="
CARDS = "?abcdefghijklmnop"  # card 1 is a


def _rules(params: Params) -> str:
    if params.get("imp_info", False):
        seen = "You see who won a prize, but not the opponent's card, unless it was a tie."
    else:
        seen = "After each round both bids are known, and both hands are always visible."
    n = params["num_cards"]
    return rules_text("goofspiel", num_cards=n, order=ORDER[params["points_order"]], seen=seen, last_id=n - 1)


def _view(state: State, seat: int) -> tuple[dict[str, list[int]], list[tuple[int, str]], list[int]]:
    """Return the numbers in each line of the information state, (prize, result) of each finished round, and own bids.

    Own bids are listed only where bids are hidden: open ones show in the hands.
    """
    lines = (line.partition(":") for line in state.information_state_string(seat).splitlines())
    fields = {label: [int(n) for n in re.findall(r"-?\d+", numbers)] for label, _, numbers in lines}
    results = (WON if winner == seat else TIED if winner < 0 else LOST for winner in fields["Win sequence"])
    rounds = list(zip(fields["Point card sequence"], results, strict=False))
    return fields, rounds, [action + 1 for action in fields.get(f"P{seat} action sequence", [])]


def _numbers(values: list[int]) -> str:
    return " ".join(map(str, values)) or "none"


def _letters(cards: list[int]) -> str:
    return "".join(CARDS[card] for card in cards)


def _describe(state: State, seat: int) -> str:
    fields, rounds, own_bids = _view(state, seat)
    prizes, points = fields["Point card sequence"], fields["Points"]
    count = len(rounds) + len(fields[f"P{seat} hand"])
    words = {WON: "you won", LOST: "opponent won", TIED: "tie"}
    lines = [
        f"Current prize: {_numbers(prizes[len(rounds) :])}",
        f"Prizes still to come: {_numbers([k for k in range(1, count + 1) if k not in prizes])}",
        f"Your hand: {_numbers(fields[f'P{seat} hand'])}",
    ]
    if (hand := fields.get(f"P{1 - seat} hand")) is not None:
        lines.append(f"Opponent's hand: {_numbers(hand)}")
    lines.append(f"Points: you {points[seat]}, opponent {points[1 - seat]}")
    for i, (prize, result) in enumerate(rounds):
        bid = f", your bid {own_bids[i]}" if own_bids else ""
        lines.append(f"Round {i + 1}: prize {prize}{bid}, {words[result]}")
    return "\n".join(lines)


def _compact(state: State, seat: int) -> str:
    """Current prize (a is 1), then what is known of each round.

    With hidden bids: result, prize and own bid of each round. With open bids: own hand, the opponent's in capitals,
    points, then prize and result of each round.
    """
    fields, rounds, own_bids = _view(state, seat)
    current = _letters(fields["Point card sequence"][len(rounds) :])
    if own_bids or f"P{1 - seat} hand" not in fields:
        played = [r + CARDS[prize] + CARDS[bid] for (prize, r), bid in zip(rounds, own_bids, strict=True)]
        return current + "".join(played)
    own, other = (_letters(fields[f"P{p} hand"]) for p in (seat, 1 - seat))
    points = fields["Points"]
    played = [f"{CARDS[prize]}{result}" for prize, result in rounds]
    return " ".join([current, *own, *other.upper(), f"{points[seat]}-{points[1 - seat]}", *played])


GAME = Game(
    name="goofspiel",
    params=lambda config_id: {"players": 2, "num_cards": 8 + 2 * (config_id % 5), "points_order": "random"},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    compact_actions=False,
)
