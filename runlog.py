"""What a running program shows and guards: log lines, metrics, progress, wandb, the lock on its directory, signals."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from env_wrapper import Action, Query
from utils import (
    CheckpointError,
    ConfigError,
    config_diff,
    latest_checkpoint,
    load_checkpoint,
    naming,
    redact,
    sweep,
)

log = logging.getLogger(__name__)


class _Redacted(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def setup_logging(level: int = logging.INFO) -> None:
    """Log to stderr and print uncaught exceptions, both without secrets."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Redacted("%(levelname)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells every single request
    sys.excepthook = lambda *exc: print(redact("".join(traceback.format_exception(*exc))), end="", file=sys.stderr)


class MetricsLog:
    """A file of JSON lines, each with its ``step``, in the order of steps. Numbers that are not finite become null.

    Rows that cannot be written, the disk being full, are kept in memory and written with a later one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None
        self._waiting = b""

    def truncate_to(self, step: int) -> int:
        """Drop all rows after ``step`` and a torn last line; return the step of the last row kept (0: none)."""
        self.close()
        self._waiting = b""
        kept, last = 0, 0
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        for line in lines:
            row_step = _step_of(line)
            if row_step is None or row_step > step:
                break
            kept, last = kept + len(line), row_step
        if lines:
            os.truncate(self.path, kept)
        return last

    def append(self, row: Mapping[str, Any]) -> None:
        """Hand one row (with an integer ``step``) to the operating system."""
        if type(row["step"]) is not int:
            raise TypeError(f"step must be an int, not {row['step']!r}")
        told = bool(self._waiting)
        self._waiting += json.dumps(finite(redact(dict(row))), allow_nan=False).encode() + b"\n"
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


def lock_run(run_dir: str | Path) -> IO[str]:
    """Create the run's directory, take it for this process until the returned file is closed, and sweep it.

    Raises:
        ConfigError: another process has it, or it cannot be written.
    """
    import fcntl

    path = Path(run_dir) / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as exc:
        raise ConfigError(f"{run_dir}: cannot be written: {exc.strerror}") from exc
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise ConfigError(f"{run_dir}: in use by another run (process {owner})") from exc
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    sweep(path.parent)
    return file


class StopSignal:
    """While entered, the first SIGTERM or SIGINT only sets ``received``; the second ends the process at once."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """128 + signal number, as a shell reports it."""
        return 128 + self.received

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number


class InterruptedRolloutError(Exception):
    """A signal arrived at a point where nothing of the step has been applied yet."""


@dataclass
class StoppablePlayer:
    """The policy, leaving the rollout or the evaluation when a signal has arrived: it has changed nothing so far."""

    policy: Any
    stop: StopSignal

    def act(self, queries: Sequence[Query]) -> list[Action]:
        """Answer, unless the run is to stop."""
        if self.stop.received:
            raise InterruptedRolloutError
        return self.policy.act(queries)

    def action_probs(self, queries: Sequence[Query]) -> list[dict[int, float]]:
        """Probability of every legal action, unless the run is to stop."""
        if self.stop.received:
            raise InterruptedRolloutError
        return self.policy.action_probs(queries)

    def release(self, episodes: list[int]) -> None:
        """Pass on which episodes ended."""
        self.policy.release(episodes)


class Console:
    """A progress bar on a terminal, plain lines elsewhere; both without secrets."""

    def __init__(self, total: int, done: int = 0, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout
        self._bar: Any = None
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
            self._bar.update(self._task, completed=step, description=redact(line))
        else:
            self.say(line)

    def say(self, text: str) -> None:
        """Print a lasting line."""
        if self._bar:
            self._bar.console.print(redact(text))
        else:
            print(redact(text), file=self._stream, flush=True)

    def close(self) -> None:
        """Take the bar down."""
        if self._bar:
            self._bar.stop()


class WandbLog:
    """Sends metrics to Weights & Biases if that is wanted and possible; never a reason to stop.

    ``mode``: "auto" (online where WANDB_API_KEY is set, else disabled), "online", "offline", "disabled".
    """

    def __init__(self, mode: str, run_dir: str | Path, config: Mapping[str, Any], **options: Any) -> None:
        self._run: Any = None
        if mode == "auto":
            mode = "online" if os.environ.get("WANDB_API_KEY") else "disabled"
        if mode == "online" and not os.environ.get("WANDB_API_KEY"):
            log.warning("wandb is off: WANDB_API_KEY is not set")
        elif mode != "disabled":
            self._try(lambda: self._start(mode, str(run_dir), redact(dict(config)), options))

    def log(self, row: Mapping[str, Any]) -> None:
        """Send one row of metrics under its ``step``."""
        if self._run:
            self._try(lambda: self._run.log(redact(dict(row)), step=row["step"]))

    def close(self, exit_code: int = 0) -> None:
        """Finish the run."""
        if self._run:
            self._try(lambda: self._run.finish(exit_code=exit_code))

    def _start(self, mode: Any, run_dir: str, config: dict[str, Any], options: dict[str, Any]) -> None:
        import wandb

        settings = wandb.Settings(init_timeout=20, silent=True)
        self._run = wandb.init(mode=mode, dir=run_dir, config=config, resume="allow", settings=settings, **options)

    def _try(self, act: Any) -> None:
        try:
            act()
        except Exception as exc:
            self._run = None
            log.warning("wandb is off from here: %s", redact(" ".join(f"{type(exc).__name__}: {exc}".split())))


def peak_memory_mb() -> float:
    """Peak memory so far: of the GPU where there is one, else of the process."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def progress_line(row: Mapping[str, Any], total: int, seconds_left: float) -> str:
    """One line a step, from its row of metrics."""
    minutes, seconds = divmod(int(seconds_left), 60)
    return (
        f"Step {row['step']}/{total} | reward {row['reward_mean']:+.2f} | score {row['score_mean']:.2f} | "
        f"success {row['success_rate']:.0%} | kl {row['approx_kl']:.4f} | entropy {row['entropy']:.2f} | "
        f"stage {row['stage']} | {row['games_per_s']:.1f} games/s | ETA {minutes}m{seconds:02d}s"
    )


def find_checkpoint(run_dir: Path, resume: str | None, resolved: dict[str, Any], force_config: bool) -> Path | None:
    """The checkpoint to go on from (None: a fresh run).

    Raises:
        ConfigError: nothing to resume, a run that would be overwritten, or knobs that have changed since.
    """
    if resume is None:
        if any(run_dir.glob("checkpoint-*")):
            raise ConfigError(
                f"run.output_dir: {run_dir} holds checkpoints; --resume goes on, --output-dir starts another"
            )
        return None
    path = Path(resume) if resume else latest_checkpoint(run_dir)
    if path is None:
        raise ConfigError(f"--resume: no checkpoint that verifies in {run_dir}")
    try:
        saved = load_checkpoint(path).json("run_config")
    except CheckpointError as error:
        raise ConfigError(f"--resume: {error}") from error
    if not isinstance(saved, dict):
        raise ConfigError(f"--resume: {path / 'run_config.json'}: is no configuration")
    harmless = ("run.output_dir", "run.wandb", "run.keep", "ppo.save_freq", "ppo.eval_freq")
    changed = [line for line in config_diff(saved, redact(resolved)) if not line.startswith(harmless)]
    if changed and not force_config:
        raise ConfigError(f"--resume: the configuration has changed since {path.name}: {'; '.join(changed)}; "
                          "--force-config goes on with the new one")  # fmt: skip
    return path
