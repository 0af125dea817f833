"""Command lines, read alike by every program."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

# One meaning, whichever of them a program declares and help shows.
ALIKE = (
    ("--run", "--checkpoint", "--checkpoint-dir", "--adapters"), ("--episodes", "--num-episodes"),
    ("--games", "--game"), ("--output", "--output-dir"),
)  # fmt: skip


class FlagParser(argparse.ArgumentParser):
    """``--output_dir`` and ``--output-dir`` are the same flag, whichever was declared; so are those of ``ALIKE``."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's, the flags written as they were declared."""
        declared = {flag.replace("_", "-"): flag for flag in self._option_string_actions}

        def as_declared(word: str) -> str:
            flag, equals, value = word.partition("=")
            plain = flag.replace("_", "-")
            others = next((group for group in ALIKE if plain in group), ())
            found = next((declared[name] for name in (plain, *others) if name in declared), flag)
            return found + equals + value if word.startswith("--") else word

        words = sys.argv[1:] if args is None else args
        for word in words:
            if word != (shown := word.encode(errors="replace").decode()):
                self.error(f"{shown}: is not UTF-8 text")
        return super().parse_known_args([as_declared(word) for word in words], namespace)

    def error(self, message: str) -> NoReturn:
        """Say in one line what is wrong with the command line, and leave with 2."""
        self.exit(2, f"error: {message}\n")
