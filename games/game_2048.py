"""2048, the sliding-tile puzzle (a module's name cannot be a number)."""

from games.base import Game, rules_text

GAME = Game(
    name="2048",
    rules=lambda params: rules_text("2048"),
    describe=lambda state, seat: str(state).rstrip(),
    compact=lambda state, seat: "/".join(",".join(row.split()) for row in str(state).rstrip().splitlines()),
    history_turns=0,
)
