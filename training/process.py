"""The process of a program: its one line of failure, log lines, the lock on a run's directory, signals that end it."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fcntl
import gc
import io
import logging
import math
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from config.flags import one_line
from envs.types import Action, InterruptedRolloutError, Query
from utils import CheckpointError, ConfigError, checkpoints_in, redact, sweep

# What a run writes into its folder; whatever else is there may be anybody's.
OWN = ("checkpoint-*", "final", "average", "metrics.jsonl", "episodes.jsonl", "summary.json", "about.json",
       "run_config.json", "abandoned-*")  # fmt: skip


TOGETHER = 0.5  # seconds between two signals that are one


class ProgramError(RuntimeError):
    """A program cannot do what it was asked to; the message is its last line."""


class TrainingError(ProgramError):
    """Training cannot go on; the message is the last line of the program."""


class _Redacted(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _RunLog(logging.FileHandler):
    """``run.log``: what was logged and shown, with its time. Whatever is wrong with it, the run goes on."""

    def _open(self) -> Any:
        # A link would lead to another file, a pipe wait for a reader.
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.fdopen(os.open(self.baseFilename, how, 0o666), "a", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        pass


def log_into(run_dir: Path) -> None:
    """Also write what is logged, and the lines of the console, to the run's ``run.log``; until the next program."""
    handler = _RunLog(run_dir / "run.log", delay=True)
    handler.setFormatter(_Redacted("%(asctime)s %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger("training").setLevel(logging.DEBUG)


def say_how_to_go_on(program: str, run_dir: str, processes: int, stream: IO[str]) -> None:
    """Print what is typed to go on with a run from here, where there is a checkpoint to go on from."""
    try:
        if not any(Path(run_dir).glob("checkpoint-*")):
            return
    except OSError:  # no such place
        return

    def short(path: str) -> str:
        return shlex.quote(path.removeprefix(f"{Path.cwd()}{os.sep}"))

    launcher = f"-m torch.distributed.run --standalone --nproc_per_node={processes}".split() if processes > 1 else []
    words = [short(sys.executable), *launcher, short(program), "--resume", short(str(Path(run_dir)))]
    print(f"go on with: {' '.join(words)}", file=stream)


def setup_logging() -> None:
    """Log to stderr and print uncaught exceptions, both without secrets; what the terminal cannot show becomes "?".

    A program whose reader leaves (``| head``) goes on: its tables may be wanted, its files are.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # closed: nobody answers, which is told, and nobody reads
            setattr(sys, name, open(os.devnull, mode, errors="replace"))  # noqa: SIM115, as long as the program
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
            if "write" not in vars(stream):
                _go_on_unread(stream)
    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO)  # lower ones are for the run's own file
    handler.setFormatter(_Redacted("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells every single request
    sys.excepthook = lambda *exc: print(redact("".join(traceback.format_exception(*exc))), end="", file=sys.stderr)


def _go_on_unread(stream: io.TextIOWrapper) -> None:
    """Let a stream lead to nowhere from the moment that nobody reads it, or that it leads to a full disk."""

    def going_on(do: Callable[..., Any], *args: Any) -> Any:
        try:
            return do(*args)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if not isinstance(error, BrokenPipeError) and stream is not sys.stderr:
                logging.getLogger(__name__).warning("what is printed is lost: %s", error.strerror)
            return do(*args)

    for name in ("write", "flush"):
        setattr(stream, name, partial(going_on, getattr(stream, name)))


def device_errors() -> Any:  # a tuple of them, which mypy takes for no exceptions in an ``except``
    """What a device raises that has too little memory, or has failed; () where nobody has loaded torch."""
    torch = sys.modules.get("torch")
    return (torch.OutOfMemoryError, torch.AcceleratorError) if torch else ()


def run_program(body: Callable[[], int | None]) -> int:
    """Run the body of a program, tell what ended it in one line without secrets, and return the exit code.

    0, or what the body returns; 1 after a ProgramError, or where a device has too little memory or fails; 2 after bad
    usage or a file that cannot be used; 130 after an interrupt or the end of the input.
    """
    setup_logging()
    try:
        code = body() or 0
        sys.stdout.flush()
        return code
    except (ConfigError, CheckpointError, OSError) as error:
        message, code = str(error), 2
    except (ProgramError, *device_errors()) as error:
        message, code = str(error), 1
    except (KeyboardInterrupt, EOFError):
        message, code = "interrupted", 130
    print(f"error: {one_line(redact(message))}", file=sys.stderr)
    return code


def at_least(least: float, most: float = 2**31 - 1) -> Callable[[str], float]:
    """An argparse type: finite numbers from ``least`` to ``most``, whole ones where ``least`` is an int."""

    def number(text: str) -> float:
        try:
            value = type(least)(text)
        except ValueError as error:
            kind = "a whole number" if isinstance(least, int) else "a number"
            raise argparse.ArgumentTypeError(f"{text}: expected {kind}") from error
        if value == math.inf:
            raise argparse.ArgumentTypeError(f"{text}: expected a finite number")
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: expected at least {least} and at most {most}")
        return value

    return number


def rest_collector() -> None:
    """Leave garbage collection to what a program makes from now on, and let it come a hundred times more rarely.

    Else each full collection walks all objects of the libraries, for longer than a tiny rollout takes, and each of the
    young ones the decisions of a step that is being played: together a third of a tiny rollout.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


def must_be_writable(folder: Path) -> None:
    """Make a folder, and sure that files can be written into it; else ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error


def lock_run(run_dir: str | Path, seen: list[str] | None = None) -> IO[str]:
    """Create the run's directory, take it for this process until the returned file is closed, and sweep it.

    Raises:
        ConfigError: another process has it, or it cannot be written, or its checkpoints are no longer those ``seen``.
    """
    path = Path(run_dir) / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A link would lead to another file, a pipe wait for somebody.
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "r+")
    except OSError as exc:
        raise ConfigError(f"{run_dir}: cannot be written: {exc.strerror}") from exc
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise ConfigError(f"{run_dir}: in use by another run (process {owner})") from exc
    except OSError as exc:  # some network disks have none
        file.close()
        raise ConfigError(f"{run_dir}: cannot be locked: {exc.strerror}; choose a folder on another disk") from exc
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    for name in OWN:
        sweep(path.parent, name)
    if seen is not None and seen != [found.name for found in checkpoints_in(path.parent)]:
        file.close()
        raise ConfigError(f"{run_dir}: another run has written to it meanwhile; the same command goes on")
    return file


def check_lock(run_dir: Path, lock: IO[str] | None) -> None:
    """Make sure, before something is written into a run's folder, that it is still the one that ``lock`` was taken on.

    Raises:
        TrainingError: it was moved, deleted or replaced by another, which may be another run's.
    """
    try:
        held = lock is None or os.path.samestat(os.fstat(lock.fileno()), os.stat(run_dir / ".lock"))
    except OSError as error:  # of a disk that fails for a moment whoever writes will tell
        held = not isinstance(error, FileNotFoundError | NotADirectoryError)
    if not held:
        raise TrainingError(f"{run_dir}: the run's folder was moved, deleted or replaced; nothing more is written")


def leave(code: int) -> NoReturn:
    """End the process; after a signal at once: the interpreter would wait for searches that nobody awaits."""
    if code > 128:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


class StopSignal:
    """While entered, the first SIGTERM, SIGINT or SIGHUP only sets ``received``; the second ends the process at once.

    A terminal that is closed sends SIGHUP, which stays ignored under ``nohup``. Shells and service managers send it
    twice, or beside SIGTERM: what comes within ``TOGETHER`` seconds is one.
    """

    def __init__(self) -> None:
        self.received, self._at = 0, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        heard = [signal.SIGTERM, signal.SIGINT]
        heard += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
        self._before = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._at:  # ``received`` may be another process's
            self.received, self._at = self.received or number, now
        elif now - self._at > TOGETHER:
            os._exit(128 + number)


@dataclass
class StoppablePlayer:
    """The policy, leaving the rollout or the evaluation when a signal has arrived: it has changed nothing so far."""

    policy: Any
    stop: StopSignal

    def leave_if_stopped(self) -> None:
        """Raise InterruptedRolloutError once the run is to stop; ``play`` asks while it waits for searches."""
        if self.stop.received:
            raise InterruptedRolloutError

    def act(self, queries: Sequence[Query]) -> list[Action]:
        """Answer, unless the run is to stop."""
        self.leave_if_stopped()
        return self.policy.act(queries)

    def action_probs(self, queries: Sequence[Query]) -> list[dict[int, float]]:
        """Probability of every legal action, unless the run is to stop."""
        self.leave_if_stopped()
        return self.policy.action_probs(queries)

    def release(self, episodes: list[int]) -> None:
        """Pass on which episodes ended."""
        self.policy.release(episodes)
