"""Gin rummy: one hand of 7 to 9 cards."""

from __future__ import annotations

from typing import Any

from games.base import Game, State

RANKS, SUITS = "A23456789TJQK", "scdh"
DRAW_UPCARD, DRAW_STOCK, PASS, KNOCK, FIRST_MELD = 52, 53, 54, 55, 56
PHASES = {
    "FIRST_UPCARD": "take the first upcard or pass",
    "DRAW": "draw",
    "DISCARD": "discard or knock",
    "KNOCK": "knocked: discard, then lay melds, then pass",
    "LAYOFF": "lay cards off on the knocker's melds, pass, lay your own melds, pass",
    "WALL": "the stock is used up: knock or pass",
}

# What the engine's deadwood means where it is not simply the best arrangement of the hand.
COUNTED = {
    "DISCARD": " after the best discard",
    "KNOCK": " (all cards not laid down)",
    "LAYOFF": " (all cards not laid down)",
}


def _rules(params: dict[str, Any]) -> str:
    hand, knock = params.get("hand_size", 10), params.get("knock_card", 10)
    return (
        f"Gin rummy for two players, one hand of {hand} cards each from a 52-card deck. Cards are named rank then suit "
        "(Ts is the ten of spades); A counts 1, 2-9 their number, T, J, Q and K 10 each. A meld is three or four cards "
        "of one rank, or a run of three to five cards of one suit (A is low). Cards in no meld are deadwood; the "
        "best arrangement counts.\n"
        "Player 0 may take the first upcard (52) or pass (54), then Player 1; if both pass, Player 0 draws from the "
        "stock. A turn is: draw the upcard (52) or from the stock (53), then discard a card, which becomes the upcard; "
        f"or Knock (55), possible if your deadwood after the discard is at most {knock}: then discard, lay down your "
        "melds one action each and Pass. The opponent then lays single cards off on your melds, passes, lays down own "
        "melds and passes.\n"
        "The knocker wins the difference in deadwood; with deadwood 0 (gin) 25 more. If the opponent has less deadwood "
        "than the knocker, the opponent wins the difference and 25 more. Nobody scores when only 2 cards are left in "
        "the stock and the player does not knock, after very many draws of the upcard, or when both players in turn "
        "take the upcard and discard it again.\n"
        "IDs: spades A-K 0-12, clubs 13-25, diamonds 26-38, hearts 39-51; melds from 56 on."
    )


def _card(card: int) -> str:
    return RANKS[card % 13] + SUITS[card // 13]


def _cards(cards: list[int], separator: str = " ") -> str:
    return separator.join(_card(card) for card in cards)


def _melds(state: State, player: int) -> list[str]:
    """Return what the player has laid down, each meld as its cards."""
    melds = state.layed_melds()[player]
    return [state.action_to_string(player, FIRST_MELD + meld).split(": ")[-1] for meld in melds]


def _phase(state: State) -> str:
    return str(state.current_phase()).rpartition(".")[2]


def _log(state: State) -> list[list[str]]:
    """Return the turns up to a knock as [player, source, discard]; source is upcard, stock or pass."""
    turns: list[list[str]] = []
    for item in state.full_history():
        if item.action == KNOCK:
            break
        if item.player < 0:
            continue
        if item.action < DRAW_UPCARD:
            turns[-1].append(_card(item.action))
        else:
            source = {DRAW_UPCARD: "upcard", DRAW_STOCK: "stock", PASS: "pass"}[item.action]
            turns.append([str(item.player), source])
    return turns


def _describe(state: State, seat: int) -> str:
    known, upcard = sorted(state.known_cards()[1 - seat]), state.upcard()
    lines = [f"Phase: {PHASES.get(_phase(state), 'over')}", f"Your hand: {_cards(sorted(state.hands()[seat]))}"]
    lines.append(f"Your deadwood{COUNTED.get(_phase(state), '')}: {state.deadwood()[seat]}")
    lines.append(f"Upcard: {'none' if upcard is None else _card(upcard)}. Stock: {state.stock_size()} cards.")
    lines.append(f"Discard pile, oldest first: {_cards(state.discard_pile()) or 'empty'}")
    lines.append(f"Opponent's known cards: {_cards(known) or 'none'}")
    for player, name in ((seat, "You"), (1 - seat, "Opponent")):
        if state.knocked()[player]:
            lines.append(f"{name} knocked.")
        if melds := _melds(state, player):
            lines.append(f"{name} laid down: {' '.join(melds)}")
    if state.layoffs():
        lines.append(f"Laid off: {_cards(state.layoffs())}")
    log = [f"{'you' if int(p) == seat else 'opp'} {' '.join(rest)}" for p, *rest in _log(state)]
    lines.append(f"Turns so far (draw, discard): {', '.join(log) or 'none'}")
    return "\n".join(lines)


def _compact(state: State, seat: int) -> str:
    """Phase, hand, deadwood, upcard, stock, opponent's known cards, melds and layoffs, then the turns.

    A turn ``-s7h`` is: - the opponent (+ own), drew from the stock (u upcard, p passed), discarded 7h.
    """
    upcard = state.upcard()
    parts = [_phase(state)[:2].lower(), _cards(sorted(state.hands()[seat]), ""), str(state.deadwood()[seat])]
    parts.append("--" if upcard is None else _card(upcard))
    parts.append(str(state.stock_size()))
    parts.append(_cards(sorted(state.known_cards()[1 - seat]), ""))
    parts.append(" ".join(_melds(state, seat) + _melds(state, 1 - seat)))
    parts.append(_cards(state.layoffs(), ""))
    turns = [f"{'+' if int(p) == seat else '-'}{source[0]}{''.join(rest)}" for p, source, *rest in _log(state)]
    return "|".join([*parts, "".join(turns)])


GAME = Game(
    name="gin_rummy",
    params=lambda config_id: {"hand_size": 7 + config_id // 3 % 3, "knock_card": 10 - config_id % 3},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(500, 10),
    history_turns=0,
)
