"""One sandboxed interpreter seen from outside: started, fed, its output capped, killed with all its descendants."""

import contextlib
import functools
import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import NamedTuple

from envs.trace.confine import READY

# Imported rather than run as a script, so that its compiled form is kept.
START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); import confine; sys.path.pop(0); exec(*confine.start(sys.argv))"
)
START_S = 30.0  # until an interpreter is locked in: a busy machine may take longer than a program is given
TICK_S = 0.05  # how often a running program's process is looked at
STDERR_BYTES = 16_384
TAG = re.compile(rb"^__DBG_\d__\n", re.MULTILINE)  # by which a print reports itself in a trial run (``prints.py``)
NOWHERE = "/proc"  # a working directory in which not even root can make a file


class SandboxError(RuntimeError):
    """The sandbox itself failed (not the program in it)."""


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    wall_s: float = 10.0  # seconds from handing the program over to its end; CPU seconds are capped at the next integer
    memory_mb: int = 512  # address space of the process
    output_kb: int = 256  # standard output; more ends the program
    disk_mb: int = 16  # its folder, in namespaces; elsewhere it has none and can write to no file
    threads: int = 32
    open_files: int = 64


class Run(NamedTuple):
    """How a program ended.

    ``status``: ok (exit code 0) | error (exception, exit code, signal) | timeout | output (that limit was
    passed and the program ended). ``returncode`` is 128 + the signal for programs ended by one. ``stdout`` has
    universal newlines, as in text mode; ``stderr`` is the first and the last 16 KiB, between them what prints report.
    """

    stdout: str
    stderr: str
    status: str
    returncode: int
    seconds: float


class Interpreter:
    """One locked-in interpreter: a process in a session of its own, with pipes."""

    def __init__(self, limits: Limits, mechanisms: str, hash_seed: int, mode: str):
        self.limits, self.in_namespaces = limits, "namespaces" in mechanisms
        settings = {
            "mode": mode,
            "with": mechanisms,
            "memory": limits.memory_mb << 20,
            "cpu": 0 if mode == "serve" else int(limits.wall_s) + 1,
            "disk": limits.disk_mb << 20,
            "open": limits.open_files,
            "threads": limits.threads + (0 if self.in_namespaces else _threads_of_user()),
        }
        flags = ["-s", "-S", "-P", "-X", "utf8", "-c", START, str(Path(__file__).parent)]  # -I, but reads the hash seed
        self.process = subprocess.Popen(
            [os.path.realpath(sys.executable), *flags, *(f"{name}={value}" for name, value in settings.items())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PYTHONHASHSEED": str(hash_seed), **({"TZ": "XXX-23:59"} if hash_seed else {})},
            cwd=NOWHERE,
            start_new_session=True,
        )
        for pipe in self.pipes:
            os.set_blocking(pipe.fileno(), False)
        self.pending, self.stdout, self.stderr, self.status = b"", bytearray(), bytearray(), ""
        self.open_outputs = {self.process.stdout, self.process.stderr}
        self.started = self.deadline = self.next_look = 0.0

    @property
    def pipes(self) -> list:
        """Standard input, output and error, as this side holds them."""
        return [self.process.stdin, self.process.stdout, self.process.stderr]

    def begin(self, data: bytes, seconds: float = START_S) -> None:
        """Hand over ``data``; the clock starts, and again where it is the program's turn."""
        self.pending = data
        self.started = time.monotonic()
        self.deadline = self.started + seconds

    def exited(self) -> bool:
        """Whether the process has ended; it is not reaped, so that its group can still be killed by number."""
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        except ChildProcessError:  # it ended, and something else in this process has waited for any child
            return True

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
            self.stderr += data
            if len(self.stderr) > 2 * STDERR_BYTES:  # how it ended is the last that is said
                tags = b"".join(sorted(set(TAG.findall(self.stderr))))
                self.stderr = self.stderr[:STDERR_BYTES] + b"\n" + tags + self.stderr[-STDERR_BYTES:]
        else:
            if not self.stdout:  # READY
                self.started = time.monotonic()
                self.deadline = self.started + self.limits.wall_s
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
        self.next_look = now + TICK_S
        return bool(self.status)

    def attend(self) -> None:
        """Feed it and take what it says until it is through."""
        with DefaultSelector() as selector:
            for pipe in self.pipes:
                selector.register(pipe, EVENT_WRITE if pipe is self.process.stdin else EVENT_READ)
            while not self.through():
                for key, _ in selector.select(TICK_S if self.open_outputs else 0.001):
                    pipe = key.fileobj
                    if pipe is not self.process.stdin:
                        self.read(pipe)
                        through = pipe not in self.open_outputs
                    else:
                        self.write()
                        if through := not self.pending:
                            self.process.stdin.close()
                    if through:
                        selector.unregister(pipe)

    def end(self) -> None:
        """Kill the whole session and reap it; nothing more the second time."""
        if self.process.returncode is not None:
            return
        if self.in_namespaces:  # the process outside kills the one inside, reaps it and ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.terminate()
                self.process.wait(1.0)
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pipe in self.pipes:
            pipe.close()

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


def receive(server: Interpreter, count: int) -> bytes:
    """Exactly ``count`` bytes from the serving interpreter, sending what is pending; TimeoutError at its deadline."""
    sink, source, _ = (pipe.fileno() for pipe in server.pipes)
    data = b""
    while len(data) < count:
        left = server.deadline - time.monotonic()
        pipes = select.poll()  # select itself knows no descriptor above 1,023
        pipes.register(source, select.POLLIN)
        if server.pending:
            pipes.register(sink, select.POLLOUT)
        ready = {descriptor for descriptor, _ in pipes.poll(1000 * max(0.0, left))}
        if left <= 0:
            raise TimeoutError
        if sink in ready:
            server.write()
        if source in ready:
            piece = os.read(source, count - len(data))
            if not piece:
                server.drain()
                raise SandboxError(f"sandbox: the serving interpreter ended: {server.stderr.decode(errors='replace')}")
            data += piece
    return data


@functools.cache
def _threads_of_user() -> int:
    """Threads this user runs, generously: outside a user namespace RLIMIT_NPROC counts them all together."""
    total = 256
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.geteuid():
                total += len(os.listdir(f"/proc/{entry.name}/task"))
    return total
