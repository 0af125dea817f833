"""What the texts of the trick-taking games have in common: seats, hands and tricks."""

import itertools
import re

SEATS = ("North", "East", "South", "West")
Trick = list[tuple[int, str]]  # (seat, card) in order of play


def parse_hand(view: str) -> dict[str, str]:
    """Return suit letter -> rank letters, from lines such as ``S QT``; an empty suit is ``none``."""
    suits = re.findall(r"^([SHDC]) (\S+) *$", view, re.M)
    return {suit: "" if ranks == "none" else ranks for suit, ranks in suits}


def parse_tricks(view: str) -> list[Trick]:
    """Return the tricks so far, the current one last.

    Column k of the engine's table, three characters wide, belongs to seat k mod 4; an empty line ends the table.
    """
    lines = iter(view.splitlines())
    if not any(line.startswith("N  E  S  W  N  E  S") for line in lines):
        return []
    rows = itertools.takewhile(str.strip, lines)
    cells = ([(i // 3 % 4, row[i : i + 3].strip()) for i in range(0, len(row), 3)] for row in rows)
    return [[(seat, card) for seat, card in row if card] for row in cells]
