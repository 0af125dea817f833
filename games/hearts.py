"""Hearts: four players, one deal; avoid the hearts and the queen of spades."""

import re

from games.base import Game, Params, State, rules_text
from games.tricks import SEATS, parse_hand, parse_tricks


def _rules(params: Params) -> str:
    jack = " The jack of diamonds (JD) takes off 10 points from who wins it."
    no_tricks = " Winning no trick at all takes off 5 points, unless someone shot the moon."
    bonuses = [text for key, text in (("jd_bonus", jack), ("avoid_all_tricks_bonus", no_tricks)) if params.get(key)]
    return rules_text("hearts", extra="".join(bonuses))


def _cards(view: str) -> list[str]:
    return [rank + suit for suit, ranks in parse_hand(view).items() for rank in ranks]


def _fields(view: str) -> tuple[str, str, str, list[int]]:
    """Return pass direction, cards passed, cards received ("" where the view has none) and points by player."""
    texts = {key: value.strip() for key, _, value in (line.partition(":") for line in view.splitlines())}
    points = [int(n) for n in re.findall(r"^[NESW]: (-?\d+)$", view, re.M)]
    passed, received = texts.get("Passed Cards", ""), texts.get("Received Cards", "")
    return texts.get("Pass Direction", ""), passed, received, points or [0, 0, 0, 0]


def _describe(state: State, seat: int) -> str:
    view = state.information_state_string(seat)
    direction, passed, received, points = _fields(view)
    tricks = parse_tricks(view)
    lines = [f"You are {SEATS[seat]}. Pass direction: {direction}", f"Your hand: {' '.join(_cards(view)) or 'none'}"]
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
    view = state.information_state_string(seat)
    direction, passed, received, points = _fields(view)
    hand = "".join(_cards(view))
    tricks = [f"{(t[0][0] - seat) % 4}:{''.join(card for _, card in t)}" for t in parse_tricks(view)]
    turned = ",".join(str(points[(seat + i) % 4]) for i in range(4))
    moved = f"{passed}>{received}".replace(" ", "")
    return f"{direction[0]}|{hand}|{moved}|{turned}|{' '.join(tricks)}"


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
