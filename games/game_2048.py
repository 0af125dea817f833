"""2048, the sliding-tile puzzle (a module's name cannot be a number)."""

from games.base import Game, State, rules_text


def _describe(state: State, seat: int) -> str:
    return str(state).rstrip()


def _compact(state: State, seat: int) -> str:
    return "/".join(",".join(row.split()) for row in str(state).rstrip().splitlines())


GAME = Game(
    name="2048",
    rules=lambda params: rules_text("2048"),
    describe=_describe,
    compact=_compact,
    history_turns=0,
)
