"""Command lines, read alike by every program."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any


class FlagParser(argparse.ArgumentParser):
    """``--output_dir`` and ``--output-dir`` are the same flag, whichever was declared."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's, the flags written as they were declared."""
        declared = {flag.replace("_", "-"): flag for flag in self._option_string_actions}

        def as_declared(word: str) -> str:
            flag, equals, value = word.partition("=")
            return declared.get(flag.replace("_", "-"), flag) + equals + value if word.startswith("--") else word

        return super().parse_known_args(
            [as_declared(word) for word in (sys.argv[1:] if args is None else args)], namespace
        )
