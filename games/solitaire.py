"""Klondike solitaire as the engine plays it: the whole stock is face up and every third card of it can be played."""

from games.base import Game, State, rules_text

_HIDDEN = "\U0001f0a0"  # the engine's face-down card
_DEPTH = 150  # the engine's depth limit, on deals, moves and turned-up cards together


def _parts(state: State) -> tuple[list[str], list[str], list[tuple[int, list[str]]]]:
    """Return waste, foundation tops (a suit alone: empty), and each non-empty pile's face-down count and open cards."""
    lines = state.observation_string(0).splitlines()
    waste, tops = (line.split(":", 1)[1].split() for line in lines[:2])
    last = next(i for i, line in enumerate(lines) if line.startswith("TARGETS"))
    piles = [line.split() for line in lines[3:last]]
    return waste, tops, [(pile.count(_HIDDEN), [card for card in pile if card != _HIDDEN]) for pile in piles]


def _describe(state: State, seat: int) -> str:
    waste, tops, piles = _parts(state)
    lines = ["Waste, playable cards in brackets: " + " ".join(c if i % 3 else f"[{c}]" for i, c in enumerate(waste))]
    lines.append("Foundations: " + " ".join(top if len(top) > 1 else f"{top}(empty)" for top in tops))
    lines += [f"Pile: {' '.join(['##'] * hidden + cards)}" for hidden, cards in piles]
    lines.append(f"Empty piles: {7 - len(piles)}. Face-down cards are ##. Steps left: {_DEPTH - len(state.history())}.")
    return "\n".join(lines)


def _compact(state: State, seat: int) -> str:
    waste, tops, piles = _parts(state)
    columns = [f"{hidden}{''.join(cards)}" for hidden, cards in piles]
    return f"{''.join(waste)}|{''.join(tops)}|{' '.join(columns)}|{_DEPTH - len(state.history())}"


GAME = Game(
    name="solitaire",
    rules=lambda params: rules_text("solitaire"),
    describe=_describe,
    compact=_compact,
    history_turns=0,
)
