"""Runs Python programs that nobody vetted: each in a fresh interpreter, locked in before it reads a line of them.

``confine.py`` is the inside of the sandbox (what it takes away and how); this file starts it, feeds it, caps
it and cleans up. What is contained at which level is in ``docs/trace.md``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from selectors import EVENT_READ, EVENT_WRITE, BaseSelector, DefaultSelector
from typing import NamedTuple

log = logging.getLogger(__name__)
LEVELS = ("rlimits", "seccomp and one of landlock, namespaces", "seccomp, landlock and namespaces")
# Tried in this order; the first that works on this machine is used.
MECHANISMS = ("namespaces+landlock+seccomp", "landlock+seccomp", "namespaces+seccomp", "seccomp", "landlock", "none")
# Imported rather than run as a script, so that its compiled form is kept.
START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); import confine; sys.path.pop(0); exec(*confine.start(sys.argv))"
)
READY = b"+"
TICK_S, CLOSING_TICK_S = 0.05, 0.001  # how often a running program's folder and process are looked at
STDERR_BYTES = 16_384


class SandboxError(RuntimeError):
    """The sandbox itself failed (not the program in it)."""


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    wall_s: float = 10.0  # seconds from handing the program over to its end; CPU seconds are capped at the next integer
    memory_mb: int = 512  # address space of the process
    output_kb: int = 256  # standard output; more ends the program
    disk_mb: int = 16  # its temporary folder
    threads: int = 32
    open_files: int = 64


class Run(NamedTuple):
    """How a program ended.

    ``status``: ok (exit code 0) | error (exception, exit code, signal) | timeout | output | disk (that limit was
    passed and the program ended). ``returncode`` is 128 + the signal for programs ended by one. ``stdout`` has
    universal newlines, as in text mode; ``stderr`` is the first 16 KiB.
    """

    stdout: str
    stderr: str
    status: str
    returncode: int
    seconds: float


class _Interpreter:
    """One locked-in interpreter: a process in a session of its own, with pipes and a temporary folder."""

    def __init__(self, limits: Limits, mechanisms: str, hash_seed: int, mode: str):
        self.limits = limits
        self.folder = "" if "namespaces" in mechanisms else tempfile.mkdtemp(prefix="sandbox-")
        settings = {
            "mode": mode,
            "with": mechanisms,
            "memory": limits.memory_mb << 20,
            "cpu": 0 if mode == "serve" else int(limits.wall_s) + 1,
            "file": limits.disk_mb << 20,
            "scratch": limits.disk_mb << 20,
            "open": limits.open_files,
            "threads": limits.threads + (0 if "namespaces" in mechanisms else _threads_of_user()),
        }
        flags = ["-s", "-S", "-P", "-X", "utf8", "-c", START, str(Path(__file__).parent)]  # -I, but reads the hash seed
        self.process = subprocess.Popen(
            [os.path.realpath(sys.executable), *flags, *(f"{name}={value}" for name, value in settings.items())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PYTHONHASHSEED": str(hash_seed)},
            cwd=self.folder or "/",
            start_new_session=True,
        )
        for pipe in self.pipes:
            os.set_blocking(pipe.fileno(), False)
        self.pending, self.stdout, self.stderr, self.status = b"", bytearray(), bytearray(), ""
        self.open_outputs = {self.process.stdout, self.process.stderr}
        self.started = self.deadline = self.next_look = 0.0

    @property
    def pipes(self) -> list:
        return [self.process.stdin, self.process.stdout, self.process.stderr]

    def begin(self, data: bytes) -> None:
        """Hand over ``data``; the clock starts."""
        self.pending = data
        self.started = time.monotonic()
        self.deadline = self.started + self.limits.wall_s

    def exited(self) -> bool:
        """Whether the process has ended; it is not reaped, so that its group can still be killed by number."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def write(self) -> None:
        """Send what the pipe takes; forget the rest when nobody reads."""
        assert self.process.stdin is not None
        try:
            self.pending = self.pending[os.write(self.process.stdin.fileno(), self.pending[:65536]) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.pending = b""

    def read(self, pipe) -> bool:
        """Take one piece of output; False when there is none for now. Notes the end of the pipe and too much output."""
        try:
            data = os.read(pipe.fileno(), 65536)
        except BlockingIOError:
            return False
        if not data:
            self.open_outputs.discard(pipe)
        elif pipe is self.process.stderr:
            self.stderr += data[: STDERR_BYTES - len(self.stderr)]
        else:
            room = (self.limits.output_kb << 10) + len(READY) - len(self.stdout)
            self.stdout += data[:room]
            self.status = self.status or ("output" if len(data) > room else "")
        return bool(data)

    def drain(self) -> None:
        """Take what an ended process left in its pipes (64 KiB at most, unless an orphan still writes)."""
        for pipe in list(self.open_outputs):
            for _ in range(16):
                if not self.read(pipe):
                    break

    def through(self) -> bool:
        """Whether it has ended or must end; notes in ``status`` the limit that was passed, if any."""
        now = time.monotonic()
        if self.status:
            return True
        if now >= self.deadline:
            self.status = "timeout"
        elif self.open_outputs and now < self.next_look:
            return False
        elif self.exited():
            self.drain()
            return True
        elif self.folder and _disk_use(self.folder) > self.limits.disk_mb << 20:
            self.status = "disk"
        self.next_look = now + TICK_S
        return bool(self.status)

    def end(self) -> None:
        """Kill the whole session, reap it and remove its folder."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in self.pipes:
            pipe.close()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def result(self) -> Run:
        """How it ended. SandboxError if it was not even locked in."""
        if self.stdout[:1] != READY:
            why = self.stderr.decode(errors="replace").strip() or f"exit code {self.process.returncode}"
            raise SandboxError(f"sandbox: the interpreter did not start: {why[-300:]}")
        code = self.process.returncode
        code = 128 - code if code < 0 else code
        text = self.stdout[1:].decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
        status = self.status or ("ok" if code == 0 else "error")
        return Run(text, self.stderr.decode(errors="replace"), status, code, time.monotonic() - self.started)


class Sandbox:
    """Runs programs. Use as a context manager, or ``close()`` it.

    Args:
        limits: what one program may use.
        min_level: the lowest level (index into ``LEVELS``) that untrusted programs may run at; below it the
            constructor raises ``SandboxError``.
        spares: interpreters started ahead of need; also how many programs ``run_many`` runs at once.
        hash_seed: ``PYTHONHASHSEED`` of the programs; fixed, so that a program always has the same answer.
        mechanisms: one of ``MECHANISMS``; None takes the strongest this machine offers.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        min_level: int = 1,
        spares: int = 2,
        hash_seed: int = 0,
        mechanisms: str | None = None,
    ):
        self.limits = limits or Limits()
        self.mechanisms = mechanisms or probe()
        self.level = level_of(self.mechanisms)
        if self.level < min_level:
            raise SandboxError(
                f"sandbox_min_level is {min_level} ({LEVELS[min_level]}); this machine reaches {self.level} "
                f"({self.mechanisms}): use a machine with Landlock or user namespaces, or source generator"
            )
        self.spares, self.hash_seed = max(1, spares), hash_seed
        self._waiting: list[_Interpreter] = []
        self._server: _Interpreter | None = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, program: str, stdin: str = "") -> Run:
        """Run one program in an interpreter of its own. SandboxError if the sandbox itself fails."""
        return self.run_many([(program, stdin)])[0]

    def run_many(self, programs: Sequence[tuple[str, str]]) -> list[Run]:
        """Run (program, stdin) pairs, ``spares`` at a time, each in an interpreter of its own; results in order."""
        results: list[Run | None] = [None] * len(programs)
        todo = iter(enumerate(programs))
        running: dict[_Interpreter, int] = {}
        with DefaultSelector() as selector:
            try:
                while True:
                    for at, (program, stdin) in islice(todo, self.spares - len(running)):
                        interpreter = self._take()
                        running[interpreter] = at
                        source = program.encode(errors="replace")
                        interpreter.begin(len(source).to_bytes(4, "big") + source + stdin.encode(errors="replace"))
                        for pipe in interpreter.pipes:
                            writes = pipe is interpreter.process.stdin
                            selector.register(pipe, EVENT_WRITE if writes else EVENT_READ, interpreter)
                    if not running:
                        break
                    for interpreter in _advance(selector, list(running)):
                        at = running.pop(interpreter)
                        interpreter.end()
                        results[at] = interpreter.result()
            finally:
                for interpreter in running:
                    interpreter.end()
        return [result for result in results if result is not None]

    def run_trusted(self, program: str, stdin: str = "") -> Run:
        """Run a program of our own making in one interpreter that is used again and again (about 50 times faster).

        It is locked in like the others, but programs in it are not protected from each other.
        """
        if self._server is None or self._server.exited():
            self._end_server()
            self._server = _Interpreter(self.limits, self.mechanisms, self.hash_seed, "serve")
            self._server.begin(b"")
            _receive(self._server, len(READY))
        server, started = self._server, time.monotonic()
        source = json.dumps([program, stdin]).encode()
        server.begin(len(source).to_bytes(4, "big") + source)
        try:
            answer = _receive(server, int.from_bytes(_receive(server, 4), "big"))
        except TimeoutError:
            self._end_server()
            return Run("", "", "timeout", 128 + signal.SIGKILL, time.monotonic() - started)
        stdout, stderr, error = json.loads(answer)
        return Run(stdout, stderr + error, "error" if error else "ok", int(bool(error)), time.monotonic() - started)

    def close(self) -> None:
        """End every interpreter that still waits."""
        while self._waiting:
            self._waiting.pop().end()
        self._end_server()

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.end()
            self._server = None

    def _take(self) -> _Interpreter:
        """An interpreter started earlier, and another one started in its place."""
        while self._waiting and self._waiting[0].exited():
            self._waiting.pop(0).end()
        while len(self._waiting) <= self.spares:
            self._waiting.append(_Interpreter(self.limits, self.mechanisms, self.hash_seed, "once"))
        return self._waiting.pop(0)


def level_of(mechanisms: str) -> int:
    """The level (index into ``LEVELS``) that these mechanisms amount to."""
    parts = mechanisms.split("+")
    return 0 if "seccomp" not in parts else int("landlock" in parts) + int("namespaces" in parts)


# What a program at level 1 or above must find: an importable library, a writable folder, no files, no sockets.
PROBE = """
import colorsys, socket, sys
open("probe", "w").write("x")
def refused(attempt):
    try:
        attempt()
    except OSError:
        return True
    return False
print(refused(lambda: open(sys.stdin.readline())), refused(socket.socket))
"""


@functools.cache
def probe() -> str:
    """The strongest of ``MECHANISMS`` that works here, tried out in a real interpreter; logged once."""
    for mechanisms in MECHANISMS[:-1]:
        wanted = [("landlock" in mechanisms or "namespaces" in mechanisms), "seccomp" in mechanisms]
        try:
            with Sandbox(min_level=0, spares=1, mechanisms=mechanisms) as sandbox:
                run = sandbox.run(PROBE, os.path.abspath(__file__))
        except (SandboxError, OSError) as error:
            log.debug("sandbox: no %s: %s", mechanisms, error)
            continue
        if run.stdout.split() == [str(part) for part in wanted]:
            log.info("sandbox level %d: %s", level_of(mechanisms), mechanisms)
            return mechanisms
        log.debug("sandbox: %s does not hold: %s %s", mechanisms, run.stdout, run.stderr)
    log.warning("sandbox level 0: resource limits only, programs can read files and use the network")
    return MECHANISMS[-1]


def _receive(server: _Interpreter, count: int) -> bytes:
    """Exactly ``count`` bytes from the serving interpreter, sending what is pending; TimeoutError at its deadline."""
    sink, source, errors = (pipe.fileno() for pipe in server.pipes)
    data = b""
    while len(data) < count:
        left = server.deadline - time.monotonic()
        readable, writable, _ = select.select([source], [sink] if server.pending else [], [], max(0.0, left))
        if left <= 0:
            raise TimeoutError
        if writable:
            server.write()
        if readable:
            piece = os.read(source, count - len(data))
            if not piece:
                why = os.read(errors, 300).decode(errors="replace")
                raise SandboxError(f"sandbox: the serving interpreter ended: {why}")
            data += piece
    return data


def _advance(selector: BaseSelector, running: list[_Interpreter]) -> list[_Interpreter]:
    """Move data for at most one tick; the interpreters that are through, no longer watched."""
    closing = any(not interpreter.open_outputs for interpreter in running)
    for key, _ in selector.select(CLOSING_TICK_S if closing else TICK_S):
        interpreter, pipe = key.data, key.fileobj
        if pipe is interpreter.process.stdin:
            interpreter.write()
            if not interpreter.pending:
                selector.unregister(pipe)
                pipe.close()
            continue
        interpreter.read(pipe)
        if pipe not in interpreter.open_outputs:
            selector.unregister(pipe)
    through = [interpreter for interpreter in running if interpreter.through()]
    for key in list(selector.get_map().values()):
        if key.data in through:
            selector.unregister(key.fileobj)
    return through


def _disk_use(folder: str) -> int:
    """Bytes below ``folder``, each entry counted as at least one 4 KiB block; vanished entries count nothing."""
    total = 0
    for parent, folders, files in os.walk(folder):
        for name in folders + files:
            with contextlib.suppress(OSError):
                total += max(4096, os.lstat(os.path.join(parent, name)).st_blocks * 512)
    return total


@functools.cache
def _threads_of_user() -> int:
    """Threads this user runs, generously: outside a user namespace RLIMIT_NPROC counts them all together."""
    total = 256
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.geteuid():
                total += len(os.listdir(f"/proc/{entry.name}/task"))
    return total
