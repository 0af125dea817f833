"""What a game is to this project: a name, parameters, rules text and two ways to describe a position."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Params = dict[str, Any]  # of pyspiel.load_game
State = Any  # a pyspiel.State; games/ never imports pyspiel, it only calls methods of the state it is given


def rules_text(name: str, **values: Any) -> str:
    """The text of ``games/rules/NAME.txt``, with values for its names in braces."""
    text = (Path(__file__).parent / "rules" / f"{name}.txt").read_text(encoding="utf-8")
    return text.removesuffix("\n").format(**values)


def signed(mark: str, seat: int, cell: str) -> str:
    """A stone in compact prompts: + if it is of the player in ``seat`` (x is seat 0's), else -, and its cell.

    Qwen's pre-tokenizer keeps a sign and the letters after it together, so that a stone can be one token that says
    all of it wherever it stands; in a row of cells that is left to its place in the text.
    """
    return "+-"[(mark == "x") != (seat == 0)] + cell


def seen_from(seat: int, board: str, marks: str) -> str:
    """A board on which x is the player in ``seat`` and o the other; ``marks`` are those of seats 0 and 1."""
    return board.translate(str.maketrans(marks if seat == 0 else marks[::-1], "xo"))


@dataclass(frozen=True)
class Game:
    """Facts and pure functions; everything that plays the game lives in ``envs/``.

    Attributes:
        name: unique name in ``games.GAMES`` (``leduc_poker``, ``hex_small``).
        rules: parameters -> rules text, true for exactly these parameters.
        describe: (state, seat) -> what the player in ``seat`` may know, for the full prompt.
        compact: (state, seat) -> the same information in as few tokens as possible.
        params: config_id -> the parameters of ``pyspiel.load_game`` (only those that are not the default).
        spiel_name: OpenSpiel's short name where it differs from ``name``.
        mcts: (simulations, rollouts per simulation) of the ``mcts`` opponent, None: it falls back to random.
        history_turns: default number of past turns kept in the conversation; None keeps them all, an
            integer is safe only because ``describe`` alone determines the information state.
        dealt: chance outcome -> its name, where OpenSpiel's is a bare number.
        compact_actions: the compact prompt lists the legal actions (False: they follow from position and variant).
    """

    name: str
    rules: Callable[[Params], str]
    describe: Callable[[State, int], str]
    compact: Callable[[State, int], str]
    params: Callable[[int], Params] = lambda config_id: {}
    spiel_name: str = ""
    mcts: tuple[int, int] | None = None
    history_turns: int | None = None
    compact_actions: bool = True
    dealt: Callable[[int], str] | None = None

    @property
    def short_name(self) -> str:
        """OpenSpiel's name of the game."""
        return self.spiel_name or self.name
