"""What a run shows on its terminal."""

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from config.reader import printable
from utils import redact

QUIET_SECONDS = 10.0  # between two plain lines of progress
RECENT = 20  # steps whose mean time predicts that of the next ones
ROWS = 8  # steps in the table
WIDE = 110  # terminal columns from which on the table has all of COLUMNS
BLOCKS = "▁▂▃▄▅▆▇█"
# Heading, key of the row, format (z: zero without a sign), whether narrow terminals show it too.
COLUMNS = (
    ("step", "step", "d", True), ("score", "score_mean", "z.3f", True), ("success", "success_rate", "z.0%", True),
    ("entropy", "entropy", "z.2f", True), ("kl", "update_kl", "z.4f", True),
    ("critic", "explained_variance", "z.2f", True), ("clipped", "clip_fraction", "z.0%", False),
    ("value loss", "value_loss", "z.3f", False), ("gradient", "grad_norm", "z.2f", False),
    ("legal", "legal_mass", "z.2g", False), ("rate", "learning_rate", "z.1e", False),
    ("decisions", "decisions", ",d", False), ("games/s", "games_per_s", "z,.1f", True),
)  # fmt: skip

log = logging.getLogger(__name__)


def _shown(text: str) -> str:
    return printable(redact(text))


class Console:
    """A live picture of the run on a terminal; plain lines elsewhere and with ``NO_COLOR``. Secrets are redacted."""

    def __init__(self, total: int, stream: IO[str] | None = None, eval_freq: int = 0) -> None:
        self._stream, self.total, self.done, self.eval_freq = stream or sys.stdout, total, 0, eval_freq
        self._steps: list[float] = []  # seconds of the latest steps
        self._evaluation: list[float] = []  # start and latest progress of the evaluation since the last step
        self._evaluated = 0.0  # seconds of the latest evaluation
        self._live: Any = None
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self._drawn = self._stream.isatty() and not plain
        self._began = self._told = -QUIET_SECONDS
        self._since = self._latest = time.monotonic()
        self._apart = 0.0  # seconds of what ``progress`` has shown
        self._rows: list[Mapping[str, Any]] = []
        self._scores: list[float] = []
        self._left = self._note = ""
        if self._drawn:
            from rich.console import Console as RichConsole

            self._rich = RichConsole(file=self._stream, markup=False, emoji=False, highlight=False)

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a training step, given its row of metrics."""
        self._rows = [*self._rows, row][-ROWS:]
        self._scores.append(row["score_mean"])
        left = duration(self._seconds_left(row["step"], row["time_total"]))
        self._show(row["step"], progress_line(row, self.total, left), left, "")

    def _seconds_left(self, step: int, seconds: float) -> float:
        """Time left with steps and evaluations as long as the latest. The first step is slow and does not count."""
        self._steps = [*self._steps, seconds][-RECENT:] if len(self._scores) > 2 else [seconds]
        if self._evaluation:
            self._evaluated, self._evaluation = self._evaluation[-1] - self._evaluation[0], []
        last, every = self.total - 1, self.eval_freq
        between = last // every - min(step, last) // every if every else 0
        return (self.total - step) * sum(self._steps) / len(self._steps) + (1 + between) * self._evaluated

    def update(self, done: int, line: str) -> None:
        """Show the progress of another program than the trainer, which words the line."""
        left = duration((self.total - done) * (time.monotonic() - self._since - self._apart) / max(done, 1))
        self._show(done, line if self._drawn else f"{line} | ETA {left}", left, line)

    def _show(self, done: int, line: str, left: str, note: str) -> None:
        self.done, self._left, self._note = done, f"{left} left", note
        if self._drawn:
            log.debug("%s", line)
            self._draw()
        else:
            self.say(line)

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how much of something is done (0 when it begins) and the time left; as plain lines only now and then."""
        now = time.monotonic()
        self._evaluation = [*self._evaluation[:1], now]
        self._began = self._began if done else now
        self._apart, self._latest = self._apart + (now - self._latest if done else 0), now
        self._note = f"{what}: {done:,} of {total:,}"
        if done:
            self._note += f", {duration((total - done) * (now - self._began) / done)} left"
        if self._drawn:
            self._draw()
        elif now - self._told >= QUIET_SECONDS:
            self._told = now
            self.say(self._note)

    def say(self, text: str) -> None:
        """Print a permanent line, above the picture if there is one."""
        log.debug("%s", text)
        if self._drawn:
            self._rich.print(_shown(text))  # which breaks lines between words
        else:
            print(_shown(text), file=self._stream, flush=True)

    def close(self) -> None:
        """Stop updating the picture; later lines are printed below it."""
        if self._live:
            self._note, self._left = "", f"took {duration(time.monotonic() - self._since)}"
            during = sys.stderr
            self._live.stop()
            _turn_logs(during, sys.stderr)
        self._live, self._drawn = None, False

    # -- the picture ---------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        if self._live:
            return
        from rich.live import Live

        before = sys.stderr
        self._live = Live(console=self._rich, get_renderable=self._picture, refresh_per_second=4)
        self._live.start()
        _turn_logs(before, sys.stderr)  # which rich has replaced by one that writes above the picture

    def _picture(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        width, parts = self._rich.width, []
        if self._rows:
            parts.append(self._table(width))
        if len(scores := list(self._scores)) > 1:  # a copy: rich draws in a thread of its own
            ends = Text(f" {scores[0]:.3f} → {scores[-1]:.3f}", style="dim")
            parts.append(Text("score ").append(sparkline(scores, width - 24), style="cyan").append(ends))
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(self.total, 1), completed=self.done, width=20 if width >= WIDE else 8)
        note = " · ".join(filter(None, (_shown(self._note), self._left)))
        line.add_row(bar, f"{self.done:,}/{self.total:,}", Text(note, overflow="ellipsis", no_wrap=True))
        return Group(*parts, line)

    def _table(self, width: int) -> Any:
        from rich.table import Table
        from rich.text import Text

        shown = [(head, key, form) for head, key, form, narrow in COLUMNS if narrow or width >= WIDE]
        shown = [c for c in shown if any(row.get(c[1]) for row in self._rows)]
        while (left := width - sum(max(len(head), 6) + 2 for head, *_ in shown) - 2) < 6 and len(shown) > 2:
            shown.pop()
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for head, _, _ in shown:
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("stage", no_wrap=True, overflow="ellipsis")
        for row in self._rows:
            stage = Text(_shown(str(row["stage"]))).append("".join(f" !{a}" for a in row.get("alarms", ())), "bold red")
            stage.truncate(max(left, 1), overflow="ellipsis")
            table.add_row(*(number(row.get(key), form) for _, key, form in shown), stage)
        return table


def _turn_logs(old: Any, new: Any) -> None:
    """Redirect log lines from one stream to another."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)


def number(value: Any, form: str) -> str:
    """Format a number for a table; "-" for None and NaN."""
    return "-" if value is None or value != value else format(value, form)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the means of at most ``width`` equal parts of the values as blocks, scaled from their least to greatest."""
    size = max(1, -(-len(values) // max(width, 1)))
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    return "".join(BLOCKS[round((mean - low) / ((high - low) or 1) * (len(BLOCKS) - 1))] for mean in means)


def duration(seconds: float) -> str:
    """Format seconds as hours and minutes, or as minutes and seconds."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{seconds:02d}s"


def progress_line(row: Mapping[str, Any], total: int, left: str) -> str:
    """One line about a step, given its row of metrics."""
    return (
        f"Step {row['step']}/{total} | score {row['score_mean']:.3f} | success {row['success_rate']:.0%} | "
        f"kl {number(row['update_kl'], 'z.4f')} | entropy {number(row['entropy'], '.2f')} | stage {row['stage']} | "
        f"{row['games_per_s']:.1f} games/s | ETA {left}"
    )
