"""Hex on boards of 3 and 4: small enough to solve."""

from __future__ import annotations

from dataclasses import replace

from games.base import State, signed
from games.hex import GAME as HEX
from games.hex import board_rows


def _compact(state: State, seat: int) -> str:
    """Own direction (v top to bottom, h left to right), then each stone with its cell, a, b, ... row by row."""
    stones = zip("".join(board_rows(state)), "abcdefghijklmnop", strict=False)
    return "vh"[seat] + "".join(signed(stone, seat, cell) for stone, cell in stones if stone != ".")


GAME = replace(
    HEX,
    name="hex_small",
    params=lambda config_id: {"board_size": 3 + config_id % 2},
    spiel_name="hex",
    history_turns=None,
    compact=_compact,
    compact_actions=False,
)
