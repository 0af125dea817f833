"""Memory of a process on a CPU: what glibc keeps of what is freed, and oneDNN of the kernels that it compiles."""

import ctypes
import os
from functools import cache
from typing import Any

import psutil

IDLE = 1 << 30  # bytes that the process may grow by before what is free goes back to the kernel
KERNELS = 128  # products of one shape each that oneDNN and torch keep; a pass has 46 to 81, and no two passes the same
KERNEL_BYTES = 1.2e6  # of one, its code and its tables, measured with SmolLM2-135M

_least = 1 << 62  # bytes in memory before the smallest pass since memory was given back for the last time


@cache
def _libc() -> Any:
    """The C library where it is glibc on Linux, else None."""
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def keep_freed() -> bool:
    """Let glibc keep what is freed; else each minibatch gets its activations page by page from the kernel again.

    Worth 2 to 6 % of a step. Of kernels only the latest are kept: of 1,024, their number, SmolLM2-135M holds
    0.7 GB after a step that no pass asks for. Both libraries read theirs before the first product, and not again.
    Returns whether there was a glibc that took it. Sources: https://man7.org/linux/man-pages/man3/mallopt.3.html,
    https://uxlfoundation.github.io/oneDNN/dev_guide_primitive_cache.html
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KERNELS))
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    libc = _libc()
    return bool(libc and libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1) and libc.mallopt(M_MMAP_THRESHOLD, 2**25))


def give_back() -> None:
    """Give free memory back where the process has grown by more than ``IDLE`` since the first pass after that was done.

    What that pass left is what the next one needs: given back each time, it cost 10 % of SmolLM2-135M's update. Batches
    of ever other shapes leave holes between what is in use: an hour of it held 8.0 GB, of which 5.6 were free. Source:
    https://man7.org/linux/man-pages/man3/malloc_trim.3.html
    """
    global _least
    if not _libc():
        return
    _least = min(_least, now := psutil.Process().memory_info().rss)
    if now > _least + IDLE:
        _libc().malloc_trim(0)
        _least = 1 << 62
