"""What defines a game in this project: a name, parameters, a rules text and two descriptions of a position."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Params = dict[str, Any]  # of pyspiel.load_game
State = Any  # a pyspiel.State; games/ never imports pyspiel, it only calls methods of the state it is given


def rules_text(name: str, **values: Any) -> str:
    """Return the text of ``games/rules/NAME.txt`` with ``values`` filled in for the names in braces."""
    text = (Path(__file__).parent / "rules" / f"{name}.txt").read_text(encoding="utf-8")
    return text.removesuffix("\n").format(**values)


def signed(mark: str, seat: int, cell: str) -> str:
    """Return a stone in compact notation: + if it is of the player in ``seat`` (x is seat 0), else -; then its cell.

    Qwen's pre-tokenizer keeps a sign and the letters after it together, so a stone can be a single token that carries
    its owner and its cell. In a row of cells only its place in the text would tell the cell.
    """
    return "+-"[(mark == "x") != (seat == 0)] + cell


def seen_from(seat: int, board: str, marks: str) -> str:
    """Redraw a board so that x is the player in ``seat`` and o the other; ``marks`` are those of seats 0 and 1."""
    return board.translate(str.maketrans(marks if seat == 0 else marks[::-1], "xo"))


@dataclass(frozen=True)
class Game:
    """Facts and pure functions; everything that plays the game lives in ``envs/``.

    Attributes:
        name: unique name in ``games.GAMES`` (``leduc_poker``, ``hex_small``).
        rules: parameters -> rules text, true for exactly these parameters.
        describe: (state, seat) -> what the player in ``seat`` may know, for the full prompt.
        compact: (state, seat) -> the same information in as few tokens as possible.
        params: config_id -> parameters for ``pyspiel.load_game``; OpenSpiel has defaults for those left out.
        spiel_name: OpenSpiel's short name where it differs from ``name``.
        mcts: (simulations, rollouts per simulation) of the ``mcts`` opponent; None: it plays at random.
        history_turns: default number of past turns kept in the conversation; None keeps them all. A number is safe
            only where ``describe`` alone determines the information state.
        compact_actions: whether the compact prompt lists the legal actions (no: they follow from position and variant).
        dealt: chance outcome -> its name, where OpenSpiel's is a bare number.
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
