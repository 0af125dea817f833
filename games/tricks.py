"""What the texts of trick-taking games have in common: hands, tables of tricks, columns of seats."""

from __future__ import annotations

import re

SEATS = ("North", "East", "South", "West")


def parse_hand(view: str) -> dict[str, str]:
    """Return suit letter -> rank letters from lines such as ``S QT``; ``none`` is an empty suit."""
    suits = re.findall(r"^([SHDC]) (\S+) *$", view, re.M)
    return {suit: "" if ranks == "none" else ranks for suit, ranks in suits}


def parse_table(view: str, header: str, width: int) -> list[list[tuple[int, str]]]:
    """Return the rows below the line that starts with ``header`` as (seat, cell) in column order.

    The table ends at an empty line or at a ``Key: value`` line; column k belongs to seat k mod 4.
    """
    lines = iter(view.splitlines())
    if not any(line.startswith(header) for line in lines):
        return []
    rows = []
    for line in lines:
        if not line.strip() or ":" in line:
            break
        cells = [(i // width % 4, line[i : i + width].strip()) for i in range(0, len(line), width)]
        rows.append([(seat, cell) for seat, cell in cells if cell])
    return rows


def parse_tricks(view: str) -> list[list[tuple[int, str]]]:
    """Return the tricks so far, the running one last, each as (seat, card) in order of play."""
    return parse_table(view, "N  E  S  W  N  E  S", 3)
