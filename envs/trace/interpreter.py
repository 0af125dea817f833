"""One sandboxed interpreter from outside: start it, feed it, cap its output, kill it with all its descendants."""

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
from typing import Any, NamedTuple

from envs.trace.confine import READY

# ``confine`` is imported rather than run as a script, so that its byte code is cached.
START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); import confine; sys.path.pop(0); exec(*confine.start(sys.argv))"
)
START_S = 30.0  # for locking in, which may take a busy machine longer than a program may run
TICK_S = 0.05  # between checks whether a running program's process has ended
STDERR_BYTES = 16_384
TAG = re.compile(rb"^__DBG_\d__\n", re.MULTILINE)  # written by a print that raised in a trial run (``prints.py``)
NOWHERE = "/proc"  # a working directory in which not even root can create a file


class SandboxError(RuntimeError):
    """The sandbox itself failed (not the program in it)."""


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    wall_s: float = 10.0  # seconds from receiving the program to its end; CPU seconds are capped at the next integer
    memory_mb: int = 512  # address space of the process
    output_kb: int = 256  # standard output; more ends the program
    disk_mb: int = 16  # scratch folder, in namespaces; without them a program can write to no file
    threads: int = 32
    open_files: int = 64


class Run(NamedTuple):
    """How a program ended.

    ``status``: ok (exit code 0) | error (exception, exit code, signal) | timeout | output (ended because it passed
    that limit). ``returncode`` is 128 + the signal for a program ended by one. ``stdout`` has universal newlines, as
    in text mode. Of a long ``stderr`` the first and the last 16 KiB are kept, and between them the tags of prints.
    """

    stdout: str
    stderr: str
    status: str
    returncode: int
    seconds: float


class Interpreter:
    """One locked-in interpreter: a process in a session of its own, and the pipes to it."""

    def __init__(self, limits: Limits, mechanisms: str, hash_seed: int, mode: str):
        self.limits, self.in_namespaces = limits, "namespaces" in mechanisms
        settings = {
            "mode": mode,
            "with": mechanisms,
            "AS": limits.memory_mb << 20,  # as in RLIMIT_AS
            "CPU": 0 if mode == "serve" else int(limits.wall_s) + 1,
            "disk": limits.disk_mb << 20,
            "NOFILE": limits.open_files,
            "NPROC": limits.threads + (0 if self.in_namespaces else _threads_of_user()),
        }
        # Not -I, which would ignore the hash seed.
        flags = ["-s", "-S", "-P", "-X", "utf8", "-c", START, str(Path(__file__).parent)]
        self.process = subprocess.Popen(
            [os.path.realpath(sys.executable), *flags, *(f"{name}={value}" for name, value in settings.items())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PYTHONHASHSEED": str(hash_seed), **({"TZ": "XXX-23:59"} if hash_seed else {})},
            cwd=NOWHERE,
            start_new_session=True,
        )
        self.pipes: list[Any] = [self.process.stdin, self.process.stdout, self.process.stderr]
        for pipe in self.pipes:
            os.set_blocking(pipe.fileno(), False)
        self.pending, self.stdout, self.stderr, self.status = b"", bytearray(), bytearray(), ""
        self.open_outputs = {self.process.stdout, self.process.stderr}
        self.started = self.deadline = 0.0

    def begin(self, data: bytes, seconds: float = START_S) -> None:
        """Queue ``data`` and start the clock, which ``read`` restarts once the interpreter is locked in."""
        self.pending = data
        self.started = time.monotonic()
        self.deadline = self.started + seconds

    def exited(self) -> bool:
        """Return whether the process has ended, without reaping it: its group can still be killed by number."""
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        except ChildProcessError:  # it ended, and other code in this process has reaped it
            return True

    def write(self) -> None:
        """Send as much as the pipe takes; drop the rest if nobody reads it."""
        try:
            self.pending = self.pending[os.write(self.pipes[0].fileno(), self.pending[:65536]) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.pending = b""

    def read(self, pipe) -> bool:
        """Read one piece of output; False if there is none now. Notes the end of the pipe and output past the limit."""
        try:
            data = os.read(pipe.fileno(), 65536)
        except BlockingIOError:
            return False
        if not data:
            self.open_outputs.discard(pipe)
        elif pipe is self.process.stderr:
            self.stderr += data
            if len(self.stderr) > 2 * STDERR_BYTES:  # keep the end, which says how the program ended
                tags = b"".join(sorted(set(TAG.findall(self.stderr))))
                self.stderr = self.stderr[:STDERR_BYTES] + b"\n" + tags + self.stderr[-STDERR_BYTES:]
        else:
            if not self.stdout:  # the first byte is READY
                self.started = time.monotonic()
                self.deadline = self.started + self.limits.wall_s
            room = (self.limits.output_kb << 10) + len(READY) - len(self.stdout)
            self.stdout += data[:room]
            self.status = self.status or ("output" if len(data) > room else "")
        return bool(data)

    def drain(self) -> None:
        """Read what an ended process left in its pipes (64 KiB at most, unless an orphan still writes)."""
        for pipe in list(self.open_outputs):
            for _ in range(16):
                if not self.read(pipe):
                    break

    def through(self) -> bool:
        """Return whether the program has ended or must end; ``status`` then holds the limit that it passed, if any."""
        if not self.status:
            if time.monotonic() >= self.deadline:
                self.status = "timeout"
            elif self.exited():
                self.drain()
                return True
        return bool(self.status)

    def attend(self) -> None:
        """Send input and read output until the program is through."""
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
        """Kill the whole session and reap it; does nothing the second time."""
        if self.process.returncode is not None:
            return
        if self.in_namespaces:  # on SIGTERM the outer process kills the one inside, reaps it and ends
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
        """Return how the program ended; SandboxError if it was not even locked in."""
        if self.stdout[:1] != READY:
            why = self.stderr.decode(errors="replace").strip() or f"exit code {self.process.returncode}"
            raise SandboxError(f"sandbox: the interpreter did not start: {why[-300:]}")
        code = self.process.returncode
        code = 128 - code if code < 0 else code
        text = self.stdout[1:].decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
        status = self.status or ("ok" if code == 0 else "error")
        return Run(text, self.stderr.decode(errors="replace"), status, code, time.monotonic() - self.started)


def receive(server: Interpreter, count: int) -> bytes:
    """Read exactly ``count`` bytes from the serving interpreter, sending what is pending; TimeoutError if too late."""
    sink, source, _ = (pipe.fileno() for pipe in server.pipes)
    data = b""
    while len(data) < count:
        left = server.deadline - time.monotonic()
        pipes = select.poll()  # select.select takes no descriptor above 1,023
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
    """Return a generous count of this user's threads: outside a user namespace RLIMIT_NPROC counts all of them."""
    total = 256
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.geteuid():
                total += len(os.listdir(f"/proc/{entry.name}/task"))
    return total
