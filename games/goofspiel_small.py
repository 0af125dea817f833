"""Goofspiel with four to six cards, prizes in descending order and hidden bids: small enough to solve."""

from dataclasses import replace

from games.goofspiel import GAME as GOOFSPIEL

GAME = replace(
    GOOFSPIEL,
    name="goofspiel_small",
    params=lambda c: {"players": 2, "num_cards": 4 + c % 3, "points_order": "descending", "imp_info": True},
    spiel_name="goofspiel",
)
