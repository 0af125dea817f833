"""Gin rummy: one hand of 7 to 9 cards."""

from itertools import takewhile

from games.base import Game, State, rules_text

RANKS, SUITS = "A23456789TJQK", "scdh"
DRAW_UPCARD, DRAW_STOCK, PASS, KNOCK, FIRST_MELD = 52, 53, 54, 55, 56
PHASES = {
    "FIRST_UPCARD": "take the first upcard or pass",
    "DRAW": "draw",
    "DISCARD": "discard or knock",
    "KNOCK": "knocked: discard, then lay melds, then pass",
    "LAYOFF": "lay cards off on the knocker's melds, then pass",
    "MELDS": "lay your own melds, then pass, which ends the hand",
    "WALL": "the stock is used up: knock with the upcard, or pass",
}

# What the deadwood shown means, in phases in which it is not that of the best arrangement of the whole hand.
LAYING = ("KNOCK", "LAYOFF", "MELDS")
COUNTED = {"DISCARD": " after the best discard"} | dict.fromkeys(LAYING, " (all cards not laid down)")


def _card(card: int) -> str:
    return RANKS[card % 13] + SUITS[card // 13]


def _cards(cards: list[int], separator: str = " ") -> str:
    return separator.join(_card(card) for card in cards)


def _melds(state: State, player: int) -> list[str]:
    """Return the melds that the player has laid down, each as its cards."""
    melds = state.layed_melds()[player]
    return [state.action_to_string(player, FIRST_MELD + meld).split(": ")[-1] for meld in melds]


def _phase(state: State) -> str:
    phase = str(state.current_phase()).rpartition(".")[2]
    if phase == "FIRST_UPCARD" and state.legal_actions() == [DRAW_STOCK]:  # both have passed
        return "DRAW"
    return "MELDS" if phase == "LAYOFF" and state.finished_layoffs() else phase  # after gin from the start


def _deadwood(state: State, player: int) -> int:
    """Return the player's deadwood: the engine's, except where the engine's number would mislead.

    Before a discard it counts as if no card had to go, which is too little where all nine cards (hand size 8) are in
    melds. After a knock at the wall it is not that of the cards which are not laid down.
    """
    if _phase(state) == "DISCARD" and player == state.current_player():
        return min(state.child(card).deadwood()[player] for card in state.hands()[player])
    if _phase(state) in LAYING:
        return sum(min(card % 13 + 1, 10) for card in state.hands()[player])
    return state.deadwood()[player]


def _log(state: State) -> list[list[str]]:
    """Return the turns up to a knock, each as [player, source, discard]; the source is upcard, stock or pass."""
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
    lines.append(f"Your deadwood{COUNTED.get(_phase(state), '')}: {_deadwood(state, seat)}")
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
    """Phase, hand, deadwood, upcard, stock, opponent's known cards, melds and layoffs, then first upcard and turns.

    A turn ``-s7h`` is: - the opponent (+ own), drew from the stock (u upcard, p passed), discarded 7h.
    """
    upcard = state.upcard()
    parts = [_phase(state)[:2].lower(), _cards(sorted(state.hands()[seat]), ""), str(_deadwood(state, seat))]
    parts.append("--" if upcard is None else _card(upcard))
    parts.append(str(state.stock_size()))
    parts.append(_cards(sorted(state.known_cards()[1 - seat]), ""))
    parts.append(" ".join(_melds(state, seat) + _melds(state, 1 - seat)))
    parts.append(_cards(state.layoffs(), ""))
    turns = [f"{'+' if int(p) == seat else '-'}{source[0]}{''.join(rest)}" for p, source, *rest in _log(state)]
    *_, first = takewhile(lambda item: item.player < 0, state.full_history())  # the card dealt last is the upcard
    return "|".join([*parts, _card(first.action) + "".join(turns)])


GAME = Game(
    name="gin_rummy",
    params=lambda config_id: {"hand_size": 7 + config_id // 3 % 3, "knock_card": 10 - config_id % 3},
    rules=lambda params: rules_text("gin_rummy", **params),
    describe=_describe,
    compact=_compact,
    mcts=(500, 10),
    history_turns=0,
)
