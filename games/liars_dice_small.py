"""Liar's dice with one or two dice a player: small enough to solve."""

from dataclasses import replace

from games.liars_dice import GAME as LIARS_DICE

GAME = replace(
    LIARS_DICE,
    name="liars_dice_small",
    params=lambda config_id: {"players": 2, "numdice": 1 + config_id % 2},
    spiel_name="liars_dice",
)
