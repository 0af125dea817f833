"""Results as tables of text."""

import math
import shutil
import sys
from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import Any

import tabulate

tabulate.MIN_PADDING = 0  # columns no wider than they need to be

VALUE = "+.3f"  # format of values in tables
RARE = "draw", "truncated", "forfeited", "failed"  # columns that tables leave out where they are 0 in every row
ROW_NAMES = "player", "game", "opponent"  # columns that say what a row is of, the first of a table


def columns(rows: Seq[dict[str, Any]], style: str = "plain", **forms: str) -> str:
    """A table with a column for each key that says something in a row; ``forms``: format by key, else three digits.

    ``style``: tabulate's, "github" for Markdown. Where a terminal is too narrow for a plain one, it goes on below.
    """
    known = [key for key in rows[0] if any(row[key] is not None and (row[key] or key not in RARE) for row in rows)]
    names = [*takewhile(ROW_NAMES.__contains__, known)]
    left = known[len(names) :]
    seen = style == "plain" and sys.stdout is not None and sys.stdout.isatty()
    parts, wide = list[str](), shutil.get_terminal_size().columns if seen else math.inf

    def table(keys: Seq[str]) -> str:
        return tabulate.tabulate(
            [[row[key] for key in keys] for row in rows], keys, tablefmt=style, missingval="-", stralign="right",
            floatfmt=[forms.get(key, ".3f") for key in keys], numalign="right", colalign=("left",),
        )  # fmt: skip

    while left or not parts:
        fits = len(left)
        while fits > 1 and len(table([*names, *left[:fits]]).partition("\n")[0]) > wide:
            fits -= 1
        parts.append(table([*names, *left[:fits]]))
        left = left[fits:]
    return "\n\n".join(parts)


def between(low: float, high: float) -> str:
    """An interval as tables show it."""
    return f"[{low:{VALUE}}, {high:{VALUE}}]"


def less_luck(adjusted: float | None, ends: Any, exact: float | None = None) -> str | None:
    """The cell of a value less luck with the two ends of its interval; None where the exact value says more."""
    return None if adjusted is None or exact is not None else f"{adjusted:{VALUE}} {between(*ends)}"


def shown_share(share: float | None, ends: Seq[float] | None) -> str | None:
    """A share of the ceiling as tables show it, with its interval where it is not exact."""
    within = f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else ""
    return None if share is None else f"{share:.3f}{within}"
