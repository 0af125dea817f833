"""Where the numbers of a run go: a file of JSON lines and, if wanted, Weights & Biases."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import netrc
import os
import reprlib
import resource
import secrets
import sys
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from utils import naming, read_file, redact, write_file

log = logging.getLogger(__name__)

MOST_BYTES = 2**30  # of a run's metrics


class MetricsLog:
    """A file of JSON lines, each with its ``step``, in the order of steps. Numbers that are not finite become null.

    Rows that cannot be written, the disk being full, are kept in memory and written with a later one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None
        self._waiting = b""

    def truncate_to(self, step: int) -> int:
        """Keep the rows up to ``step``; return the step of the last one (0: none).

        Lines that are no rows, or not in their order, are set aside in ``damaged-<name>`` and named, and so are the
        steps without a row. A torn last line, which a kill leaves, is dropped: it is written again.
        """
        self.close()
        self._waiting = b""
        content = read_file(self.path, MOST_BYTES) if os.path.lexists(self.path) else b""
        kept: dict[int, bytes] = {}
        damaged, last = {}, 0
        for number, line in enumerate(content.splitlines(keepends=True), 1):
            row_step = _step_of(line)
            if row_step is not None and row_step > last:
                last = row_step
                kept |= {row_step: line} if row_step <= step else {}
            elif line.strip() and line.endswith(b"\n"):
                damaged[number] = line
        if damaged:
            aside = self.path.with_name(f"damaged-{self.path.name}")
            with aside.open("ab") as file:
                file.writelines(damaged.values())
            log.warning(
                "%s: lines %s are no rows in their order: set aside in %s",
                self.path,
                reprlib.repr(list(damaged)),
                aside,
            )
        if content != (whole := b"".join(kept.values())):
            write_file(self.path, whole)
        if content and (lost := [n for n in range(1, step + 1) if n not in kept]):
            log.warning("%s: there are no rows of %d steps: %s", self.path, len(lost), reprlib.repr(lost))
        return max(kept, default=0)

    def append(self, row: Mapping[str, Any]) -> None:
        """Hand one row (with an integer ``step``) to the operating system."""
        if type(row["step"]) is not int:
            raise TypeError(f"step must be an int, not {row['step']!r}")
        told = bool(self._waiting)
        self._waiting += json.dumps(finite(redact(dict(row), words=False)), allow_nan=False).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if not told:
                log.warning("%s cannot be written, its rows wait in memory: %s", self.path, error)

    def _write(self) -> None:
        while self._waiting:
            self._file = self._file or self.path.open("ab", buffering=0)
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def sync(self) -> None:
        """Force the rows to disk: before the checkpoint of their step, so that a resume finds no gap.

        Raises:
            CheckpointError: they cannot be written.
        """
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
    return step if type(step) is int else None


def finite(value: Any) -> Any:
    """Return nested dicts and lists with None for every number that is not finite: what strict JSON can hold."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class WandbLog:
    """Sends metrics to Weights & Biases if that is wanted and possible; never a reason to stop.

    ``mode``: "auto" (online where one is logged in, else disabled), "online", "offline", "disabled". ``resumed``: go
    on with the run whose id the folder keeps.
    """

    def __init__(self, mode: str, run_dir: str | Path, config: Mapping[str, Any], resumed: bool = False) -> None:
        self._run: Any = None
        stages = config.get("curriculum", {}).get("stages", [])
        self._stages = {stage["name"]: number for number, stage in enumerate(stages)}
        if mode == "auto":
            mode = "online" if _logged_in() else "disabled"
        if mode == "online" and not _logged_in():
            log.warning("wandb is off: there is neither WANDB_API_KEY nor a login (wandb login)")
        elif mode != "disabled":
            self._try(lambda: self._start(mode, Path(run_dir), redact(dict(config)), resumed))

    def log(self, row: Mapping[str, Any]) -> None:
        """Send one row of metrics under its ``step``, with the stage as a number too."""
        if self._run:
            number = {"stage_number": self._stages[row["stage"]]} if row.get("stage") in self._stages else {}
            self._try(lambda: self._run.log(redact(dict(row) | number), step=row["step"]))

    def close(self, exit_code: int = 0) -> None:
        """Finish the run."""
        if self._run:
            self._try(lambda: self._run.finish(exit_code=exit_code))

    def _start(self, mode: Any, run_dir: Path, config: dict[str, Any], resumed: bool) -> None:
        import wandb

        settings = wandb.Settings(init_timeout=20, silent=True)
        project = os.environ.get("WANDB_PROJECT", "chat-games-ppo")
        kept = run_dir / "wandb_id"
        run_id = read_file(kept, 100).decode().strip() if resumed and kept.exists() else secrets.token_hex(4)
        self._run = wandb.init(
            mode=mode, dir=str(run_dir), config=config, id=run_id, resume="allow", settings=settings, project=project
        )
        kept.write_text(run_id)

    def _try(self, act: Any) -> None:
        try:
            act()
        except Exception as exc:  # of wandb or the network, neither of which may cost the run
            self._run = None
            log.warning("wandb is off from here: %s", redact(" ".join(f"{type(exc).__name__}: {exc}".split())))


def _logged_in() -> bool:
    """Whether wandb would find a key: in the environment or, after ``wandb login``, in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def peak_memory_mb() -> float:
    """Peak memory so far: what the allocator holds of the GPU where there is one, else of the process."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timing(started: float, played: float, ended: float, games: int, decisions: int) -> dict[str, float]:
    """What a step took, in seconds and megabytes."""
    total = ended - started
    return {"time_rollout": played - started, "time_update": ended - played, "time_total": total,
            "games_per_s": games / total, "decisions_per_s": decisions / total,
            "memory_mb": peak_memory_mb()}  # fmt: skip
