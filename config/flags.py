"""The command-line parser that all programs share."""

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from config.reader import PRESETS, printable

# Synonymous flags: a program declares one of a group, which its help shows, and accepts the others. A second name of
# another flag, as train_ppo.py's --checkpoint-dir is of --output-dir, stands for no group.
ALIKE = (
    ("--run", "--checkpoint", "--checkpoint-dir", "--adapters"), ("--episodes", "--num-episodes"),
    ("--games", "--game"),
)  # fmt: skip
NAMES = "games", "opponents"  # lists whose names may also be separated by commas, as in --set
LONGEST = 1000  # characters of a message


def one_line(message: object) -> str:
    """Join the lines of a message, and cut out its middle where it is too long."""
    line = printable(" ".join(str(message).split()))
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"


def file_name(text: str) -> Path:
    """An argparse type: the path of a file to write. A slash at its end, which a Path forgets, names a folder."""
    if text.endswith("/"):
        raise argparse.ArgumentTypeError(f"{text}: is a folder; expected a file")
    return Path(text)


class FlagParser(argparse.ArgumentParser):
    """``--output_dir`` and ``--output-dir`` are the same flag, whichever was declared; so are those of ``ALIKE``.

    A repeated flag that takes a list extends the list. ``~`` is the home directory in ``--flag=~/x`` too, which shells
    do not expand. Empty words are refused.
    """

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:  # type: ignore[override]
        """As in argparse."""
        if options.get("nargs") in ("+", "*") and names[0].startswith("-"):
            options.setdefault("action", "extend")
        return super().add_argument(*names, **options)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As in argparse, after renaming flags to their declared spelling."""
        declared = {flag.replace("_", "-"): flag for flag in self._option_string_actions}
        firsts = {action.option_strings[0] for action in self._actions if action.option_strings}

        def as_declared(word: str) -> str:
            flag, equals, value = word.partition("=")
            plain = flag.replace("_", "-")
            others = [declared[name] for group in ALIKE if plain in group for name in group if name in declared]
            found = declared.get(plain) or next((name for name in others if name in firsts), flag)
            if found == flag and others and plain not in declared:  # of a flag that means something else
                self.error(f"unrecognized arguments: {flag}")
            return found + equals + os.path.expanduser(value) if word.startswith("--") else os.path.expanduser(word)

        words = sys.argv[1:] if args is None else args
        for before, word in zip(["", *words], words, strict=False):
            if word != (shown := word.encode(errors="replace").decode()):
                self.error(f"{shown}: is not UTF-8 text")
            if not word or (word.startswith("--") and word.partition("=")[1:] == ("=", "")):
                self.error(f"{word or before}: an empty value; is a variable of the shell not set?")
        words = [as_declared(word) for word in words]
        for path in (word.partition("=")[2] if word.startswith("--") else word for word in words):
            try:
                os.stat(path)
            except OSError as error:
                if error.errno == errno.ELOOP:  # Python up to 3.12 raises no OSError when it resolves such links
                    self.error(f"{path}: {error.strerror}")
            except ValueError:  # a null character
                pass
        found, others = super().parse_known_args(words, namespace)
        for name in NAMES:
            if isinstance(given := getattr(found, name, None), list):
                setattr(found, name, [part for word in given for part in word.split(",") if part] or given)
        return found, others

    def error(self, message: str) -> NoReturn:
        """Print one line about a wrong command line and exit with 2."""
        kind, _, words = message.partition(": ")
        word, flags = words.split(" ")[0], self._option_string_actions
        if kind == "unrecognized arguments" and "--config" in flags and word.endswith(".json"):
            message += "; --config FILE names a file of settings"
        elif kind == "unrecognized arguments" and "--config" in flags and PRESETS / f"{word}.json" in PRESETS.iterdir():
            message += f"; --config {PRESETS / f'{word}.json'} is the preset"
        elif kind == "unrecognized arguments" and "--set" in flags and (word.startswith("--") or "=" in word):
            message += "; --set KEY=VALUE changes settings"
        self.exit(2, f"error: {one_line(message)}\n")
