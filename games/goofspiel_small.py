"""Goofspiel with four to six cards, prizes in descending order and hidden bids: small enough to solve."""

from dataclasses import replace

from games.base import Params
from games.goofspiel import GAME as GOOFSPIEL


def _params(config_id: int) -> Params:
    return {"players": 2, "num_cards": 4 + config_id % 3, "points_order": "descending", "imp_info": True}


GAME = replace(GOOFSPIEL, name="goofspiel_small", params=_params, spiel_name="goofspiel")
