"""Klondike solitaire in the engine's form: the whole stock is face up and every third card of it can be played."""

from __future__ import annotations

from typing import Any

from games.base import Game, State

_HIDDEN = "\U0001f0a0"  # the engine's face-down card
_DEPTH = 150  # the engine's depth limit: deals, moves and turned-up cards together


def _rules(params: dict[str, Any]) -> str:
    return """Klondike solitaire. Build each suit from ace to king on its foundation; score as many points as you can.
- Seven tableau piles. Within a pile a card goes on one of the other colour and one rank higher (5♠ on 6♥), together \
with the cards on top of it. Only a king, with its cards, may go on an empty pile.
- A foundation takes the ace of its suit, then 2, 3 ... K. From a pile only its last card may go there. The top \
card of a foundation may go back to a pile.
- All 24 cards of the waste are face up, but only the 1st, 4th, 7th ... of those left can be played. Taking a card \
moves the later ones forward, which changes which cards can be played.
- When a pile's last face-up card leaves, the card below is turned up.
- Points: to the foundation A 100, 2 90, 3 80, 4 70, 5 60, 6 50, 7 40, 8 30, 9 20, T J Q K 10 each (taken back: the \
same points lost); a move that uncovers a face-down card +20; a card from the waste +20.
- The game ends when no move is left or no steps are left; each move and each card turned up is one step. Moving cards \
back and forth is allowed but wastes steps.
- Cards are rank then suit (T is ten). Action names: "6♥ ← 5♠" puts 5♠ on 6♥; "♠ ← A♠" starts a foundation; an empty \
pile, for kings, is shown as \U0001f0bf; kEnd, offered when nothing else is left, ends the game."""


def _parts(state: State) -> tuple[list[str], list[str], list[tuple[int, list[str]]]]:
    """Waste; foundation tops (suit alone: empty); of each non-empty pile the face-down count and the face-up cards."""
    lines = state.observation_string(0).splitlines()
    waste, tops = (line.split(":", 1)[1].split() for line in lines[:2])
    first, last = 3, next(i for i, line in enumerate(lines) if line.startswith("TARGETS"))
    piles = [line.split() for line in lines[first:last]]
    return waste, tops, [(pile.count(_HIDDEN), [card for card in pile if card != _HIDDEN]) for pile in piles]


def _steps_left(state: State) -> int:
    return _DEPTH - len(state.history())


def _describe(state: State, seat: int) -> str:
    waste, tops, piles = _parts(state)
    lines = ["Waste, playable cards in brackets: " + " ".join(c if i % 3 else f"[{c}]" for i, c in enumerate(waste))]
    lines.append("Foundations: " + " ".join(top if len(top) > 1 else f"{top}(empty)" for top in tops))
    lines += [f"Pile: {' '.join(['##'] * hidden + cards)}" for hidden, cards in piles]
    lines.append(f"Empty piles: {7 - len(piles)}. Face-down cards are ##. Steps left: {_steps_left(state)}.")
    return "\n".join(lines)


def _compact(state: State, seat: int) -> str:
    waste, tops, piles = _parts(state)
    columns = [f"{hidden}{''.join(cards)}" for hidden, cards in piles]
    return f"{''.join(waste)}|{''.join(tops)}|{' '.join(columns)}|{_steps_left(state)}"


GAME = Game(
    name="solitaire",
    params=lambda c: {},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    history_turns=0,
)
