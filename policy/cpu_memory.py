"""CPU memory: how much of what is freed glibc keeps, and how many compiled kernels oneDNN caches."""

import ctypes
import os
from functools import cache
from typing import Any

import psutil

IDLE = 1 << 30  # bytes that the process may grow by before freed memory goes back to the system
KERNELS = 128  # cached matrix products, each of one shape; a pass has 46 to 81, and no two passes have the same
KERNEL_BYTES = 1.2e6  # code and tables of one, measured with SmolLM2-135M

_least = 1 << 62  # smallest resident size at the start of a pass since memory was last given back


@cache
def _libc() -> Any:
    """The C library where it is glibc on Linux, else None."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def keep_freed() -> bool:
    """Let glibc keep freed memory, else each minibatch gets its activations page by page from the system again.

    Worth 2 to 6 % of a step. Also limits the cached kernels: with the default of 1,024 SmolLM2-135M holds 0.7 GB of
    unused ones after a step. Both libraries read their limit before the first product only. Returns whether glibc
    accepted the setting. Sources: https://man7.org/linux/man-pages/man3/mallopt.3.html,
    https://uxlfoundation.github.io/oneDNN/dev_guide_primitive_cache.html
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KERNELS))
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    libc = _libc()
    return bool(libc and libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1) and libc.mallopt(M_MMAP_THRESHOLD, 2**25))


def give_back() -> None:
    """``trim`` where the process has grown by more than ``IDLE`` since the last time.

    Not after every pass, whose memory the next one needs: that cost 10 % of SmolLM2-135M's update. Batches of varying
    shapes fragment the heap: after an hour a process held 8.0 GB, of which 5.6 were free.
    """
    global _least
    _least = min(_least, now := psutil.Process().memory_info().rss)
    if now > _least + IDLE:
        trim()


def trim() -> None:
    """Give freed memory back to the system: between rollouts and updates, which need it in other pieces."""
    global _least
    if _libc():
        _libc().malloc_trim(0)
    _least = 1 << 62
