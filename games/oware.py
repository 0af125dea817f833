"""Oware (Abapa) with six houses a side."""

from __future__ import annotations

from typing import Any

from games.base import Game, State


def _rules(params: dict[str, Any]) -> str:
    seeds = params["num_seeds_per_house"]
    return f"""Oware: capture more of the {12 * seeds} seeds than the opponent. Each player owns six houses with \
{seeds} seeds each at the start.
- Player 0 owns houses A-F (lower row, left to right) and moves first, player 1 owns a-f (upper row, right to left).
- A move takes all seeds of one of your houses and sows them one by one counter-clockwise: A to F, then a to f, then A \
again, skipping the house they came from.
- If the last seed falls in an opponent's house that then holds 2 or 3 seeds, you capture them, and those of the \
houses just before it in a row as long as they are the opponent's and hold 2 or 3. A capture that would take all the \
opponent's seeds takes none.
- If the opponent has no seeds you must make a move that gives some.
- The game ends when a player has more than {6 * seeds} seeds or both have {6 * seeds}, when the player to move has no \
legal move, or when a position is repeated. Each player then also takes the seeds left in their own houses; \
more seeds win.
- Actions 0-5 are your houses in order: A-F or a-f."""


def _numbers(state: State) -> tuple[list[int], list[int]]:
    """Captured seeds and seeds in the houses A-F a-f, from the observation ``player | scores | houses``."""
    _, scores, houses = state.observation_string(0).split("|")
    return [int(n) for n in scores.split()], [int(n) for n in houses.split()]


# Earlier positions, whose repetition ends the game, are left out.
def _describe(state: State, seat: int) -> str:
    captured, houses = _numbers(state)
    rows = [
        "  ".join(f"{'abcdef'[i]}={houses[6 + i]}" for i in range(5, -1, -1)),
        "  ".join(f"{'ABCDEF'[i]}={houses[i]}" for i in range(6)),
    ]
    who = f"You are player {seat} (houses {'A-F' if seat == 0 else 'a-f'})."
    return "\n".join([who, *rows, f"Captured: you {captured[seat]}, opponent {captured[1 - seat]}."])


def _compact(state: State, seat: int) -> str:
    """My six houses, theirs in sowing order, my and their captures."""
    captured, houses = _numbers(state)
    mine, theirs = houses[6 * seat : 6 * seat + 6], houses[6 - 6 * seat : 12 - 6 * seat]
    return f"{','.join(map(str, mine))}/{','.join(map(str, theirs))} {captured[seat]}:{captured[1 - seat]}"


GAME = Game(
    name="oware",
    params=lambda c: {"num_seeds_per_house": (4, 3, 5)[c % 3]},
    rules=_rules,
    describe=_describe,
    compact=_compact,
    mcts=(300, 30),
    history_turns=0,
    compact_actions=False,
)
