"""Oware (Abapa) with six houses a side."""

from games.base import Game, Params, State, rules_text


def _rules(params: Params) -> str:
    seeds = params["num_seeds_per_house"]
    return rules_text("oware", total=12 * seeds, seeds=seeds, half=6 * seeds)


def _numbers(state: State) -> tuple[list[int], list[int]]:
    """Return captured seeds and seeds in the houses A-F a-f; the observation is ``player | scores | houses``."""
    _, scores, houses = state.observation_string(0).split("|")
    return [int(n) for n in scores.split()], [int(n) for n in houses.split()]


# Earlier positions are left out, although repeating one ends the game.
def _describe(state: State, seat: int) -> str:
    captured, houses = _numbers(state)
    named = [f"{name}={seeds}" for name, seeds in zip("ABCDEFabcdef", houses, strict=True)]
    who = f"You are player {seat} (houses {'A-F' if seat == 0 else 'a-f'})."
    taken = f"Captured: you {captured[seat]}, opponent {captured[1 - seat]}."
    return "\n".join([who, "  ".join(reversed(named[6:])), "  ".join(named[:6]), taken])


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
