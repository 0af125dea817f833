"""Runs untrusted Python programs, each in a fresh interpreter that is locked in before it reads a line of them.

``confine.py`` is the inside of an interpreter (what it takes away and how), ``interpreter.py`` its outside. This file
finds out what the machine offers and keeps interpreters ready. What each level contains is in ``docs/trace.md``.
"""

import contextlib
import functools
import json
import logging
import os
import signal
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from envs.trace.interpreter import READY, Interpreter, Limits, Run, SandboxError, receive

log = logging.getLogger(__name__)
LEVELS = ("rlimits", "seccomp and one of landlock, namespaces", "seccomp, landlock and namespaces")
# Tried in this order; the first that works on this machine is used.
MECHANISMS = ("namespaces+landlock+seccomp", "landlock+seccomp", "namespaces+seccomp", "seccomp", "landlock", "none")


class Sandbox(contextlib.AbstractContextManager["Sandbox"]):
    """Runs programs. Use as a context manager, or ``close()`` it.

    ``min_level`` is the lowest level (index into ``LEVELS``) that untrusted programs may run at; below it the
    constructor raises ``SandboxError``. ``spares`` are interpreters started before they are needed. ``hash_seed`` is
    the programs' ``PYTHONHASHSEED``; fixed, so that a program always has the same answer. Any but 0 also shows them
    another time zone. ``mechanisms`` is one of ``MECHANISMS``; None takes the strongest that this machine offers.
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
        # One thread starts them all: the kernel ends an interpreter together with the thread that started it.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="sandbox")
        self._waiting: deque[Future[Interpreter]] = deque()
        self._server: Interpreter | None = None
        self._take_lock, self._server_lock = threading.Lock(), threading.Lock()

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, program: str, stdin: str = "") -> Run:
        """Run one program in an interpreter of its own; SandboxError if the sandbox itself fails."""
        interpreter, source = self._take(), program.encode(errors="replace")
        try:
            interpreter.begin(len(source).to_bytes(4, "big") + source + stdin.encode(errors="replace"))
            interpreter.attend()
        finally:
            interpreter.end()
        return interpreter.result()

    def run_trusted(self, program: str, stdin: str = "") -> Run:
        """Run a program of our own making in an interpreter shared by all of them (about 50 times faster).

        It is locked in like the others, but the programs in it are not protected from each other.
        """
        source = json.dumps([program, stdin]).encode()
        with self._server_lock:
            server, started = self._serving(), time.monotonic()
            server.begin(len(source).to_bytes(4, "big") + source, self.limits.wall_s)
            try:
                answer = receive(server, int.from_bytes(receive(server, 4), "big"))
            except SandboxError:
                server.end()
                raise
            except TimeoutError:
                server.end()
                return Run("", "", "timeout", 128 + signal.SIGKILL, time.monotonic() - started)
        stdout, stderr, error = json.loads(answer)
        return Run(stdout, stderr + error, "error" if error else "ok", int(bool(error)), time.monotonic() - started)

    def close(self) -> None:
        """End all interpreters."""
        while self._waiting:
            self._waiting.popleft().result().end()
        if self._server is not None:
            self._server.end()
            self._server = None
        self._starter.shutdown()

    def _start(self, mode: str) -> Future[Interpreter]:
        return self._starter.submit(Interpreter, self.limits, self.mechanisms, self.hash_seed, mode)

    def _take(self) -> Interpreter:
        """Return an interpreter started earlier, and start another one to replace it."""
        with self._take_lock:
            while len(self._waiting) <= self.spares:
                self._waiting.append(self._start("once"))
            interpreter = self._waiting.popleft().result()
        if interpreter.exited():
            interpreter.end()
            interpreter = self._start("once").result()
        return interpreter

    def _serving(self) -> Interpreter:
        """Return the interpreter that serves trusted programs, started again if it has ended."""
        if self._server is not None and (self._server.process.returncode is not None or self._server.exited()):
            self._server.end()
            self._server = None
        if self._server is None:
            server = self._start("serve").result()
            try:
                server.begin(b"")
                receive(server, len(READY))
            except (SandboxError, TimeoutError) as error:  # else its late READY is read as an answer's length
                server.end()
                raise SandboxError(str(error) or "sandbox: the interpreter did not start in time") from None
            self._server = server
        return self._server


def level_of(mechanisms: str) -> int:
    """Return the level (index into ``LEVELS``) that these mechanisms amount to."""
    parts = mechanisms.split("+")
    return 0 if "seccomp" not in parts else int("landlock" in parts) + int("namespaces" in parts)


# What a program at level 1 or above must find: libraries, no other files, no sockets; in namespaces a scratch folder.
PROBE = """
import colorsys, socket, sys
def refused(attempt):
    try:
        attempt()
    except OSError:
        return True
    return False
def write():
    with open("probe", "w") as file:
        file.write("x")
print(refused(lambda: open(sys.stdin.readline())), refused(socket.socket), refused(write))
"""


@functools.cache
def probe() -> str:
    """Return the strongest of ``MECHANISMS`` that works here, as tried in a real interpreter; logged once."""
    for mechanisms in MECHANISMS[:-1]:
        boxed = "namespaces" in mechanisms
        wanted = ["landlock" in mechanisms or boxed, "seccomp" in mechanisms, not boxed]
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
