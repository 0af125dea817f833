"""What a run shows on its terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

from utils import redact

QUIET_SECONDS = 10.0  # between two lines of progress where there is no bar

log = logging.getLogger(__name__)


class Console:
    """A progress bar on a terminal, plain lines elsewhere; both without secrets."""

    def __init__(self, total: int, done: int = 0, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout
        self._bar: Any = None
        self._began = self._told = -QUIET_SECONDS
        if self._stream.isatty():
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            text = TextColumn("{task.description}", markup=False)
            columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn(), text)
            console = RichConsole(file=self._stream, markup=False, highlight=False)
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=total, completed=done)
            self._bar.start()

    def update(self, step: int, line: str) -> None:
        """Show the line of a step."""
        if self._bar:
            log.debug("%s", line)
            self._bar.update(self._task, completed=step, description=redact(line))
        else:
            self.say(line)

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far something is (0 at its beginning) and how long it still takes; in lines, now and then."""
        now = time.monotonic()
        self._began = self._began if done else now
        line = f"{what}: {done:,} of {total:,}"
        if done:
            line += f", {duration((total - done) * (now - self._began) / done)} left"
        if self._bar:
            self._bar.update(self._task, description=redact(line))
        elif now - self._told >= QUIET_SECONDS:
            self._told = now
            self.say(line)

    def say(self, text: str) -> None:
        """Print a lasting line."""
        log.debug("%s", text)
        if self._bar:
            self._bar.console.print(redact(text))
        else:
            print(redact(text), file=self._stream, flush=True)

    def close(self) -> None:
        """Take the bar down."""
        if self._bar:
            self._bar.stop()


def duration(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"


def progress_line(row: Mapping[str, Any], total: int, seconds_left: float) -> str:
    """One line a step, from its row of metrics."""
    return (
        f"Step {row['step']}/{total} | reward {row['reward_mean']:+.2f} | score {row['score_mean']:.2f} | "
        f"success {row['success_rate']:.0%} | kl {row['approx_kl']:.4f} | entropy {row['entropy']:.2f} | "
        f"stage {row['stage']} | {row['games_per_s']:.1f} games/s | ETA {duration(seconds_left)}"
    )
