"""Hex on boards of 3 and 4: small enough to solve."""

from dataclasses import replace

from games.base import State, signed
from games.hex import GAME as HEX
from games.hex import board_rows


def _compact(state: State, seat: int) -> str:
    """Own direction (v top to bottom, h left to right), size, then each stone with its cell, a, b, ... row by row."""
    rows = board_rows(state)
    stones = zip("".join(rows), "abcdefghijklmnop"[: len(rows) ** 2], strict=True)
    return f"{'vh'[seat]}{len(rows)}" + "".join(signed(s, seat, cell) for s, cell in stones if s != ".")


GAME = replace(
    HEX,
    name="hex_small",
    params=lambda config_id: {"board_size": 3 + config_id % 2},
    spiel_name="hex",
    history_turns=None,
    compact=_compact,
    compact_actions=False,
)
