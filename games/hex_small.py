"""Hex on boards of 3 and 4: small enough to solve."""

from __future__ import annotations

from dataclasses import replace

from games.hex import GAME as HEX

GAME = replace(
    HEX,
    name="hex_small",
    params=lambda config_id: {"board_size": 3 + config_id % 2},
    spiel_name="hex",
    history_turns=None,
    compact_names=False,
)
