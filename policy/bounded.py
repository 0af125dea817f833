"""Limits on the time and memory that files of strangers may cost: chat templates, adapters."""

import multiprocessing
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil


@contextmanager
def bounded(seconds: float, spare_bytes: int) -> Iterator[None]:
    """Limit the time (TimeoutError) and the memory (MemoryError) a library may spend on an untrusted file.

    Has no effect outside of the main thread, where signals are not delivered.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    limits, held = resource.getrlimit(resource.RLIMIT_AS), psutil.Process().memory_info().vms
    room = min(size for size in (held + spare_bytes, *limits) if size != resource.RLIM_INFINITY)
    room = room if sys.platform == "linux" else limits[0]  # other systems count reserved address space
    before = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def apart(work: Callable[[], str], seconds: float, spare_bytes: int) -> str:
    """The text that ``work`` makes in a process of its own, ``bounded``, and killed where that does not end it.

    ``bounded`` alone does not: no handler of a signal runs while C compares two nested lists, which may take for ever.

    Only Linux forks safely; elsewhere it is bounded alone. RuntimeError: what went wrong in that process.
    """
    if sys.platform != "linux":
        with bounded(seconds, spare_bytes):
            return work()
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        try:
            with bounded(seconds, spare_bytes):
                theirs.send((work(), ""))
        except BaseException as error:
            theirs.send(("", f"{type(error).__name__} {error}"))

    child = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    child.start()
    theirs.close()
    text, problem = "", f"TimeoutError it takes more than {seconds:g} s"
    try:
        if ours.poll(seconds + 1):
            text, problem = ours.recv()
    except EOFError:
        problem = "it ended the process"
    finally:
        child.kill()
        child.join()
        ours.close()
    if problem:
        raise RuntimeError(problem)
    return text
