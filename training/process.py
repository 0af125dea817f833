"""What programs share as processes: error messages, logging, the lock on a run's directory, signals."""

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
from typing import IO, Any, NoReturn, Self

from config.flags import one_line
from config.reader import printable
from envs.types import Action, InterruptedRolloutError, Query
from utils import CheckpointError, ConfigError, checkpoints_in, redact, sweep

# What a run writes into its folder, which may hold other people's files as well.
OWN = ("checkpoint-*", "final", "average", "metrics.jsonl", "episodes.jsonl", "summary.json", "about.json",
       "run_config.json", "wandb_id", "bad_batch.json", "abandoned-*")  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
OTHERS_WAIT = 10.0  # seconds in which a launcher ends the others of several processes, once the first has failed
TOGETHER = 0.5  # seconds within which two signals count as one


class ProgramError(RuntimeError):
    """A program cannot do what it was asked to; the message is the last line that it prints."""


class TrainingError(ProgramError):
    """Training cannot continue."""


def cause_of(error: Exception) -> str:
    """An error in one line, with its kind unless that is a RuntimeError: our own, and those of torch and of devices."""
    kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())


class _Redacted(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(redact(super().format(record)))


class _RunLog(logging.FileHandler):
    """``run.log``: what was logged and shown, with timestamps. Its failures do not end the run."""

    def _open(self) -> Any:
        return open(self.baseFilename, "a", encoding="utf-8", opener=open_own)

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        pass


def open_own(path: str | Path, flags: int) -> int:
    """Open or create a file of a run, an ``opener``; OSError: a link to another file, a pipe that nobody reads."""
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def log_into(run_dir: Path) -> None:
    """Also write log records and lines of the console to the run's ``run.log``, until ``setup_logging`` is called."""
    handler = _RunLog(run_dir / "run.log", delay=True)
    handler.setFormatter(_Redacted("%(asctime)s %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger("training").setLevel(logging.DEBUG)


def say_how_to_go_on(program: str, run_dir: str, processes: int, stream: IO[str]) -> None:
    """Print the command that resumes the run, if it has a checkpoint."""
    launcher = f"-m torch.distributed.run --standalone --nproc_per_node={processes}" if processes > 1 else ""
    words = [sys.executable, *launcher.split(), program, "--resume", str(Path(run_dir))]
    with contextlib.suppress(OSError):  # of a name that is too long, say
        if any(Path(run_dir).glob("checkpoint-*")):
            print(f"go on with: {_from_here(words)}", file=stream)


def _from_here(words: Sequence[str]) -> str:
    here = ""
    with contextlib.suppress(OSError):  # the current folder was deleted
        here = f"{Path.cwd()}{os.sep}"
    return shlex.join(word.removeprefix(here) for word in words)


def command(program: str, *arguments: str) -> str:
    """The command that starts a program of this project from the current folder."""
    return _from_here(["python", str(ROOT / program), *arguments])


def draw_command(run_dir: Path) -> str:
    """The command that draws a run's curves and writes its reports."""
    return command("scripts/visualize.py", "--run", str(run_dir))


def setup_logging() -> None:
    """Log to stderr and print uncaught exceptions, both without secrets; what a stream cannot encode becomes "?".

    A program continues when nobody reads its output any more (``| head``): its files are still wanted.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # as programs leave it while libraries load
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # closed: reading ends at once, output is lost
            setattr(sys, name, open(os.devnull, mode, errors="replace"))  # noqa: SIM115, as long as the program
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
            if "write" not in vars(stream):
                _go_on_unread(stream)
    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO)  # lower levels are for run.log
    handler.setFormatter(_Redacted("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every single request
    sys.excepthook = lambda *exc: print(redact("".join(traceback.format_exception(*exc))), end="", file=sys.stderr)


def _go_on_unread(stream: io.TextIOWrapper) -> None:
    """Discard what is written to a stream as soon as nobody reads it, or its disk is full."""

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


def device_errors() -> Any:  # a tuple of exceptions, which mypy does not accept in an ``except``
    """The exceptions of a device that is out of memory or has failed; () as long as torch is not imported."""
    torch = sys.modules.get("torch")
    return (torch.OutOfMemoryError, torch.AcceleratorError) if torch else ()


def run_program(body: Callable[[], int | None]) -> int:
    """Run the body of a program, print in one line what failed, without secrets, and return the exit code.

    0, or what the body returns; 1 after a ProgramError, or if a device is out of memory or fails; 2 after bad usage or
    a file that cannot be used; 130 after an interrupt or the end of the input.
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


def tell_for_all(error: ConfigError) -> None:
    """Print an error that each of several processes meets: the first at once, the others if nobody has ended them."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(OTHERS_WAIT)
    print(f"error: {one_line(redact(str(error)))}", file=sys.stderr)


def at_least(least: float, most: float = 2**31 - 1) -> Callable[[str], float]:
    """An argparse type: finite numbers from ``least`` to ``most``, integers if ``least`` is one."""

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
    """Exempt all present objects from garbage collection, and collect a hundred times less often.

    Otherwise full collections walk all objects of the libraries, which takes longer than a tiny rollout, and young ones
    the decisions of the step being played: together a third of a tiny rollout.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


def must_be_writable(folder: Path) -> None:
    """Create a folder; ConfigError if that fails or no file can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error


def lock_run(run_dir: str | Path, seen: list[str] | None = None) -> IO[str]:
    """Create the run's directory, lock it until the returned file is closed, and sweep it.

    ConfigError: another process holds it, it cannot be written, or its checkpoints are no longer those ``seen``.
    """
    path = Path(run_dir) / ".lock"
    must_be_writable(path.parent)  # a lock of before may be writable where nothing else is
    try:
        file = open(path, "r+", opener=open_own)  # noqa: SIM115, as long as the run
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be written: {exc.strerror or exc}") from exc
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise ConfigError(f"{run_dir}: in use by another run (process {owner})") from exc
    except OSError as exc:  # some network disks have no locks
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
    """Raise TrainingError, before anything is written, if a run's folder was moved, deleted, or replaced by another."""
    try:
        held = lock is None or os.path.samestat(os.fstat(lock.fileno()), os.stat(run_dir / ".lock"))
    except OSError as error:  # other errors of a disk are left to whatever writes next
        held = not isinstance(error, FileNotFoundError | NotADirectoryError)
    if not held:
        raise TrainingError(f"{run_dir}: the run's folder was moved, deleted or replaced; nothing more is written")


def leave(code: int) -> NoReturn:
    """End the process; after a signal or an error at once: the interpreter would wait for searches and for servers."""
    if code:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


class StopSignal:
    """While entered, the first SIGTERM, SIGINT or SIGHUP only sets ``received``; the second ends the process at once.

    Closing a terminal sends SIGHUP, which stays ignored under ``nohup``. Shells and service managers send it twice, or
    together with SIGTERM: signals within ``TOGETHER`` seconds of the first count as one.
    """

    def __init__(self) -> None:
        self.received, self._at = 0, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        handled = [signal.SIGTERM, signal.SIGINT]
        handled += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
        self._before = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._at:  # not ``received``, which may be set by a signal to another process
            self.received, self._at = self.received or number, now
        elif now - self._at > TOGETHER:
            if terminal := next((fd for fd in (1, 2) if os.isatty(fd)), 0):
                os.write(terminal, b"\x1b[?25h\n")  # the progress line hides the cursor
            os._exit(128 + number)


@dataclass
class StoppablePlayer:
    """The policy, which ends a rollout or an evaluation once a signal has arrived: nothing has changed by then."""

    policy: Any
    stop: StopSignal

    def leave_if_stopped(self) -> None:
        """Raise InterruptedRolloutError if the run is to stop; ``play`` calls this while it waits for searches."""
        if self.stop.received:
            raise InterruptedRolloutError

    def act(self, queries: Sequence[Query]) -> list[Action]:
        """Answer the queries, unless the run is to stop."""
        self.leave_if_stopped()
        return self.policy.act(queries)

    def action_probs(self, queries: Sequence[Query]) -> list[dict[int, float]]:
        """Probability of every legal action, unless the run is to stop."""
        self.leave_if_stopped()
        return self.policy.action_probs(queries)

    def release(self, episodes: list[int]) -> None:
        """Tell the policy which episodes have ended."""
        self.policy.release(episodes)
