"""Leduc poker: six cards, two betting rounds, one public card."""

from games.base import Game, State, rules_text

RANKS = ("Jack", "Queen", "King")
SUITS = ("spades", "hearts")
WORDS = ("Fold", "Call", "Raise")


def _card(card: int) -> str:
    return f"{RANKS[card // 2]} of {SUITS[card % 2]}"


def _short(card: int) -> str:
    return RANKS[card // 2][0] + SUITS[card % 2][0]


def _describe(state: State, seat: int) -> str:
    public, put_in = state.public_card(), [100 - int(money) for money in state.money()]
    lines = [f"Your card: {_card(state.private_card(seat))}"]
    lines.append(f"Public card: {_card(public) if public >= 0 else 'not dealt yet'}")
    for number, actions in enumerate((state.round1(), state.round2()), start=1):
        words = [f"{'you' if i % 2 == seat else 'opponent'} {WORDS[a]}" for i, a in enumerate(actions)]
        if number == 1 or public >= 0:
            lines.append(f"Round {number} betting: {', '.join(words) or 'none yet'}")
    if not state.is_terminal():  # the pot has been paid out then
        lines.append(f"Chips put in: you {put_in[seat]}, opponent {put_in[1 - seat]}; pot {sum(put_in)}")
    return "\n".join(lines)


def _compact(state: State, seat: int) -> str:
    """Own card and bets of the first round; with the public card: own/public card, bets of the first/second round."""
    own, public = _short(state.private_card(seat)), state.public_card()
    first, second = ("".join("fcr"[a] for a in actions) for actions in (state.round1(), state.round2()))
    if public < 0:
        return f"{own} {first}".rstrip()
    return f"{own}/{_short(public)} {first}/{second}"


GAME = Game(
    name="leduc_poker",
    params=lambda config_id: {"players": 2},
    rules=lambda params: rules_text("leduc_poker"),
    describe=_describe,
    compact=_compact,
    mcts=(3000, 200),
    compact_actions=False,
    dealt=_card,
)
