"""Contract bridge: the auction alone, scored double-dummy, or with card play."""

import re

from games.base import Game, Params, State, rules_text

SAFE = {"who": "Nobody is", "game": 300, "small": 500, "grand": 1000, "overtrick": 100, "overtrick_redoubled": 200,
        "down": "50 each (doubled 100, 200, 200, then 300 each; redoubled twice that)"}  # fmt: skip
VULNERABLE = {"who": "Both sides are", "game": 500, "small": 750, "grand": 1500, "overtrick": 200,
              "overtrick_redoubled": 400,
              "down": "100 each (doubled 200, then 300 each; redoubled twice that)"}  # fmt: skip


def _rules(params: Params) -> str:
    play = rules_text("bridge_auction_only" if params.get("use_double_dummy_result", True) else "bridge_card_play")
    return rules_text("bridge", **(VULNERABLE if params.get("dealer_vul", False) else SAFE), play=play)


def _describe(state: State, seat: int) -> str:
    text = state.observation_string(seat).replace("Dedefence", "Defence")
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _hand(text: str, opening: str) -> str:
    """Return the four suit lines below ``opening`` as one word: ♠63♥1076♦K7♣QJ."""
    found = re.search(rf"{opening}\n((?:[♠♥♦♣].*\n){{4}})", text + "\n")
    return re.sub(r"none|\s", "", found[1]) if found else ""


def _compact(state: State, seat: int) -> str:
    """Seat and vulnerability | hand | dummy | calls, North first | tricks (leader, cards) | whether dummy plays."""
    text = state.observation_string(seat)
    dummy = re.search(r"Dummy is (\w)", text)
    calls = re.search(r"West +North +East +South *\n((?:.*\S.*\n?)*)", text)
    tricks = [
        leader[0] + "".join(re.findall(r"[♠♥♦♣]\w+", line))
        for line, leader in re.findall(r"(Trick \d+\. (\w+):.*)", text)
    ]
    parts = [
        "NESW"[seat] + ("v" if "Vul: All" in text else ""),
        _hand(text, "you hold:"),
        (dummy[1] + _hand(text, "it holds:")) if dummy else "",
        re.sub(r"[\s?]+", " ", calls[1]).strip() if calls else "",
        " ".join(tricks),
        "dummy" if "dummy's turn" in text or "dummy's lead" in text else "",
    ]
    return "|".join(parts).rstrip("|")


VARIANTS: tuple[Params, ...] = ({}, {"use_double_dummy_result": False}, {"dealer_vul": True, "non_dealer_vul": True})

GAME = Game(
    name="bridge",
    params=lambda config_id: dict(VARIANTS[config_id % 3]),
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(200, 30),
    history_turns=0,
)
