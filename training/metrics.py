"""The metrics of a step, and the file of JSON lines they are written to. Other destinations are in loggers.py."""

import contextlib
import json
import logging
import math
import os
import re
import reprlib
import resource
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from config.reader import blaming
from envs.client import one_line
from envs.types import Episode
from training.process import open_own
from utils import naming, read_file, redact, write_file

log = logging.getLogger(__name__)

MOST_BYTES = 2**30  # in a file of metrics
ALIKE = 16  # least number of decisions in one game with the same legal actions to estimate information from
_told = set[str]()  # games of which it was said that some failed
STATUS, PEAK = Path("/proc/self/status"), re.compile(r"VmHWM:\s+(\d+) kB")  # of memory, on Linux


class MetricsLog:
    """A file of JSON lines, each with its ``step``, in the order of steps. Numbers that are not finite become null.

    Rows that cannot be written, because the disk is full, say, wait in memory for the next one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None
        self._waiting = b""

    def truncate_to(self, step: int, may_lack: bool = False) -> None:
        """Keep the rows up to ``step``. ``may_lack``: no warning where there is no file.

        Lines that are no rows, or out of order, are moved to ``damaged-<name>``; a warning names them, and the steps
        without a row. An incomplete last line, left by a kill, is dropped: its step is repeated.
        """
        self.close()
        self._waiting = b""
        content = read_file(self.path, MOST_BYTES) if os.path.lexists(self.path) else b""
        lines = dict(enumerate(content.splitlines(keepends=True), 1))
        found = {number: row_step for number, line in lines.items() if (row_step := _step_of(line))}
        ordered = _in_order(found)
        kept = {found[number]: lines[number] for number in ordered if found[number] <= step}
        others = [number for number in sorted(lines.keys() - ordered) if lines[number].strip()]
        if damaged := {number: lines[number] for number in others if lines[number].endswith(b"\n")}:
            aside = self.path.with_name(f"damaged-{self.path.name}")
            with blaming("run.output_dir: ", OSError), open(aside, "ab", opener=open_own) as file:
                file.writelines(damaged.values())
            lines_named = reprlib.repr(list(damaged))
            log.warning("%s: lines %s are no rows in their order: set aside in %s", self.path, lines_named, aside)
        if content != (sound := b"".join(kept.values())):
            write_file(self.path, sound)
        if (content or not may_lack) and (lost := step - len(kept)):
            first = [*islice((n for n in range(1, step + 1) if n not in kept), 7)]
            log.warning("%s: there are no rows of %d steps: %s", self.path, lost, reprlib.repr(first))
        with blaming("run.output_dir: ", OSError):  # fail now if the run cannot append to it
            open(self.path, "ab", opener=open_own).close()
            os.utime(self.path)  # the run goes on: a summary that is newer would say that it has ended

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row (with an integer ``step``), without forcing it to disk."""
        warned = bool(self._waiting)
        self._waiting += json.dumps(finite(redact(dict(row), words=False)), allow_nan=False).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if not warned:
                log.warning("%s cannot be written, its rows wait in memory: %s", self.path, error)

    def _write(self) -> None:
        while self._waiting:
            self._file = self._file or open(self.path, "ab", 0, opener=open_own)  # noqa: SIM115, as long as the run
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def sync(self) -> None:
        """Force the rows to disk, before each checkpoint: a resumed run has no gap. CheckpointError if that fails."""
        with naming(f"{self.path.name}: "):
            self._write()
            if self._file:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; ``append`` opens it again."""
        with contextlib.suppress(OSError):
            self._write()
        if self._file:
            self._file.close()
            self._file = None


def _step_of(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if type(step) is int and step > 0 else None


def _in_order(steps: Mapping[int, int]) -> list[int]:
    """The longest increasing subsequence of line -> step, as lines: a wrong digit in one row costs no other row."""
    last, place = list[int](), dict[int, int]()  # [n]: least step with n increasing ones before it; line -> that n
    for line, step in steps.items():
        place[line] = bisect_left(last, step)
        last[place[line] : place[line] + 1] = [step]
    ordered: list[int] = []
    for line in reversed(place):
        if place[line] + len(ordered) == len(last) - 1:
            ordered.append(line)
    return ordered[::-1]


def finite(value: Any) -> Any:
    """Return a JSON-able value with None for every number that is not finite, which strict JSON cannot hold."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def peak_memory_mb() -> float:
    """Peak memory so far: reserved by the allocator if a GPU is used, else resident memory of the process."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available() and (held := torch.cuda.max_memory_reserved()):
        return held / 2**20
    if peak := PEAK.search(STATUS.read_text() if STATUS.exists() else ""):
        return int(peak[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20  # includes the parent process's peak


def summarise(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Metrics of a step's episodes: means over those that did not fail, also per game, and counts of outcomes."""
    valid = [e for e in episodes if e.outcome != "failed"]
    by_game = {game: [e.score for e in valid if e.game == game] for game in sorted({e.game for e in valid})}
    outcomes = Counter(e.outcome for e in episodes)
    if lost := [e for e in episodes if e.outcome == "failed"]:
        level = logging.DEBUG if lost[0].game in _told else logging.WARNING  # the others of a run are in its run.log
        _told.add(lost[0].game)
        why = one_line(str(lost[0].info.get("error")))
        log.log(level, "%d of a step's %d games failed and are left out; the first: %s", len(lost), len(episodes), why)
    return {
        "games": len(episodes),
        "score_mean": sum(e.score for e in valid) / len(valid),
        "success_rate": sum(e.score > 0.5 for e in valid) / len(valid),
        **{outcome: outcomes[outcome] for outcome in ("truncated", "forfeited", "failed")},
        "retries": sum(e.info.get("retries", 0) for e in episodes),
        "opponents": dict(Counter(e.task.opponent for e in episodes)),
        "mutual_information": mutual_information(valid),
        **{f"score/{game}": sum(scores) / len(scores) for game, scores in by_game.items()},
    }


def mutual_information(episodes: Sequence[Episode]) -> float | None:
    """Mutual information of an answer's first choice and the position, in nats: I(A; S) = H(A) - H(A | S).

    0 is a player that ignores the position. Only decisions of one game with the same choices are compared, at least
    ``ALIKE`` of them; None: there are none, as with free answers, which have too many first tokens. H(A) is counted,
    and corrected as in Miller's "Note on the bias of information estimates" (1955); H(A | S) is the mean of -log p.
    """
    groups: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for episode in episodes:
        for ids, d in ((s.ids, d) for chain in episode.sequences.values() for s in chain for d in s.decisions):
            if d.chosen and d.allowed:
                forced = ids[d.start : d.positions[0] + 1]  # 1 before the choices of 10 and 11, which are not 0 and 1
                alike = episode.game, tuple(forced), tuple(d.allowed[0])
                groups.setdefault(alike, []).append((d.chosen[0], d.token_logprobs[0]))
    compared = [group for group in groups.values() if len(group) >= ALIKE]
    if not compared:
        return None
    total = 0.0
    for group in compared:
        counts = Counter(chosen for chosen, _ in group).values()
        entropy = sum(n * math.log(len(group) / n) for n in counts) + (len(counts) - 1) / 2
        total += entropy + sum(logprob for _, logprob in group)
    return total / sum(map(len, compared))


def timing(started: float, played: float, ended: float, games: int, decisions: int) -> dict[str, float]:
    """Seconds, rates and megabytes of a step; arguments are times of ``time.perf_counter`` and counts."""
    total = ended - started
    return {"time_rollout": played - started, "time_update": ended - played, "time_total": total,
            "games_per_s": games / total, "decisions_per_s": decisions / total,
            "memory_mb": peak_memory_mb()}  # fmt: skip
