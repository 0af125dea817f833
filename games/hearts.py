"""Hearts: four players, one deal; avoid the hearts and the queen of spades."""

from games.base import Game, Params, State, rules_text
from games.tricks import SEATS, Trick, parse_hand, parse_tricks


def _rules(params: Params) -> str:
    jack = " The jack of diamonds (JD) takes off 10 points from who wins it."
    no_tricks = " Winning no trick at all takes off 5 points, unless someone shot the moon."
    bonuses = [text for key, text in (("jd_bonus", jack), ("avoid_all_tricks_bonus", no_tricks)) if params.get(key)]
    return rules_text("hearts", extra="".join(bonuses))


def _view(state: State, seat: int) -> tuple[str, str, str, list[str], list[int], list[Trick]]:
    """Return pass direction, cards passed and received ("" where nothing is told), hand, points by player, tricks."""
    view = state.information_state_string(seat)
    texts = {key: value.strip() for key, _, value in (line.partition(":") for line in view.splitlines())}
    direction, passed, received = (texts.get(key, "") for key in ("Pass Direction", "Passed Cards", "Received Cards"))
    hand = [rank + suit for suit, ranks in parse_hand(view).items() for rank in ranks]
    points = [state.points(player) for player in range(4)]
    return direction, passed, received, hand, points, parse_tricks(view)


def _describe(state: State, seat: int) -> str:
    direction, passed, received, hand, points, tricks = _view(state, seat)
    lines = [f"You are {SEATS[seat]}. Pass direction: {direction}", f"Your hand: {' '.join(hand) or 'none'}"]
    if direction != "No Pass":
        lines.append(f"Cards you passed: {passed or 'none yet'}; received: {received or 'none yet'}")
    if not tricks:
        lines.append("No card has been played yet.")
    for number, trick in enumerate(tricks, start=1):
        lines.append(f"Trick {number}: " + ", ".join(f"{SEATS[p]} {card}" for p, card in trick))
    lines.append("Points in finished tricks: " + ", ".join(f"{SEATS[p]} {n}" for p, n in enumerate(points)))
    return "\n".join(lines)


def _compact(state: State, seat: int) -> str:
    """Pass direction | hand | passed>received | points clockwise from ``seat`` on | tricks.

    A trick ``1:2C5C`` was led by the player one place to the left of ``seat``.
    """
    direction, passed, received, hand, points, tricks = _view(state, seat)
    played = [f"{(t[0][0] - seat) % 4}:{''.join(card for _, card in t)}" for t in tricks]
    turned = ",".join(str(points[(seat + i) % 4]) for i in range(4))
    moved = f"{passed}>{received}".replace(" ", "")
    return f"{direction[0]}|{''.join(hand)}|{moved}|{turned}|{' '.join(played)}"


GAME = Game(
    name="hearts",
    params=lambda config_id: {
        "pass_cards": bool(config_id & 1),
        "jd_bonus": bool(config_id & 2),
        "avoid_all_tricks_bonus": bool(config_id & 4),
    },
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(500, 50),
)
