"""Contract bridge: the auction alone, scored double-dummy, or with card play."""

from __future__ import annotations

import re
from typing import Any

from games.base import Game, State

_AUCTION_ONLY = """- After the auction no card is played: declarer's tricks are those of perfect play by players \
who see all cards (double-dummy)."""
_CARD_PLAY = """- Then 13 tricks are played. The player left of declarer leads; declarer's partner is dummy, whose \
hand then lies open and is played by declarer. Follow suit if you can, else play any card. The highest trump wins the \
trick, else the highest card of the suit led; the winner leads next."""


def _rules(params: dict[str, Any]) -> str:
    vulnerable = params.get("dealer_vul", False)  # both flags are set together
    game, small, grand = (500, 750, 1500) if vulnerable else (300, 500, 1000)
    if vulnerable:
        down = "100 each (doubled 200, then 300 each; redoubled twice that)"
    else:
        down = "50 each (doubled 100, 200, 200, then 300 each; redoubled twice that)"
    play = _AUCTION_ONLY if params.get("use_double_dummy_result", True) else _CARD_PLAY
    return f"""Contract bridge, one deal. North and South are partners against East and West. North deals and bids \
first, then East, South, West. {"Both sides are" if vulnerable else "Nobody is"} vulnerable.
- Auction: bid a number of tricks above six (1-7) and a trump suit ranked ♣ ♦ ♥ ♠ NT (no trumps), higher than the last \
bid; or Pass; Dbl doubles an opposing bid, RDbl redoubles their double. Three passes after a bid end it; four passes \
at the start end the deal with score 0. The first of the winning side to have named the final suit is declarer.
{play}
- A contract made scores for each trick above six ♣ ♦ 20, ♥ ♠ 30, NT 30 and 10 for the first; contracted tricks count \
double if doubled, four times if redoubled. Bonus {game} if the contracted tricks reach 100 points, else 50; small \
slam {small}, grand slam {grand} more; 50 for making a doubled, 100 a redoubled contract. Overtricks when doubled \
{200 if vulnerable else 100}, redoubled {400 if vulnerable else 200} each.
- Tricks short give the opponents {down}.
- Your side's points are your result, the opponents' loss. Cards are suit then rank: "♠K"."""


def _describe(state: State, seat: int) -> str:
    text = state.observation_string(seat).replace("Dedefence", "Defence")
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _hand(text: str, opening: str) -> str:
    """The four suit lines after ``opening`` squeezed together: ♠63♥1076♦K7♣QJ."""
    found = re.search(rf"{opening}\n((?:[♠♥♦♣].*\n){{4}})", text + "\n")
    return re.sub(r"none|\s", "", found[1]) if found else ""


def _compact(state: State, seat: int) -> str:
    """Seat, vulnerability, hand | dummy | calls from North on | tricks, each as leader and cards | whose card."""
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


def _params(config_id: int) -> dict[str, Any]:
    variants: tuple[dict[str, Any], ...] = (
        {},
        {"use_double_dummy_result": False},
        {"dealer_vul": True, "non_dealer_vul": True},
    )
    return dict(variants[config_id % 3])


GAME = Game(
    name="bridge",
    params=_params,
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(200, 30),
    history_turns=0,
)
