"""Leduc poker: six cards, two betting rounds, one public card."""

import re

from games.base import Game, State, rules_text

RANKS = ("Jack", "Queen", "King")
SUITS = ("spades", "hearts")
WORDS = ("Fold", "Call", "Raise")


def _view(state: State, seat: int) -> tuple[int, int | None, list[list[int]], list[int]]:
    """Return (private card, public card or None, actions of both rounds, chips both players have put in)."""
    view = state.information_state_string(seat)
    fields = dict(re.findall(r"\[(\w+): ?([^\]]*)\]", view))
    rounds = [[int(a) for a in fields[key].split()] for key in ("Round1", "Round2")]
    put_in = [100 - int(money) for money in fields["Money"].split()]
    public = fields.get("Public")
    return int(fields["Private"]), None if public is None else int(public), rounds, put_in


def _card(card: int) -> str:
    return f"{RANKS[card // 2]} of {SUITS[card % 2]}"


def _short(card: int) -> str:
    return RANKS[card // 2][0] + SUITS[card % 2][0]


def _describe(state: State, seat: int) -> str:
    private, public, rounds, put_in = _view(state, seat)
    lines = [f"Your card: {_card(private)}"]
    lines.append("Public card: not dealt yet" if public is None else f"Public card: {_card(public)}")
    for number, actions in enumerate(rounds, start=1):
        words = [f"{'you' if i % 2 == seat else 'opponent'} {WORDS[a]}" for i, a in enumerate(actions)]
        if number == 1 or public is not None:
            lines.append(f"Round {number} betting: {', '.join(words) or 'none yet'}")
    if not state.is_terminal():  # the pot has been paid out then
        lines.append(f"Chips put in: you {put_in[seat]}, opponent {put_in[1 - seat]}; pot {sum(put_in)}")
    return "\n".join(lines)


def _compact(state: State, seat: int) -> str:
    """Own card and bets of the first round; with the public card: own/public card, bets of the first/second round."""
    private, public, rounds, _ = _view(state, seat)
    first, second = ["".join("fcr"[a] for a in actions) for actions in rounds]
    if public is None:
        return f"{_short(private)} {first}".rstrip()
    return f"{_short(private)}/{_short(public)} {first}/{second}"


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
