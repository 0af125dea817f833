"""What a game is to this project: a name, parameters, rules text and two ways to describe a position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

State = Any  # a pyspiel.State; games/ never imports pyspiel, it only calls methods of the state it is given


@dataclass(frozen=True)
class Game:
    """Facts and pure functions; everything that plays the game lives in ``envs/``.

    Attributes:
        name: unique name in ``games.GAMES`` (``leduc_poker``, ``hex_small``).
        params: config_id -> the parameters of ``pyspiel.load_game`` (only those that are not the default).
        rules: parameters -> rules text, true for exactly these parameters.
        describe: (state, seat) -> what the player in ``seat`` may know, for the full prompt.
        compact: (state, seat) -> the same information in as few characters as possible.
        spiel_name: OpenSpiel's short name where it differs from ``name``.
        mcts: (simulations, rollouts per simulation) of the ``mcts`` opponent, None: it falls back to random.
        history_turns: default number of past turns kept in the conversation; None keeps them all, an
            integer is safe only because ``describe`` alone determines the information state.
        compact_names: the compact prompt lists ``id name`` (True) or bare ids (False: the names add nothing).
    """

    name: str
    params: Callable[[int], dict[str, Any]]
    rules: Callable[[dict[str, Any]], str]
    describe: Callable[[State, int], str]
    compact: Callable[[State, int], str]
    spiel_name: str = ""
    mcts: tuple[int, int] | None = None
    history_turns: int | None = None
    compact_names: bool = True

    @property
    def short_name(self) -> str:
        """OpenSpiel's name of the game."""
        return self.spiel_name or self.name
