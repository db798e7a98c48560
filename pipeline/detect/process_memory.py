"""What this process keeps of memory that is free: on Linux, glibc keeps much, and for each thread apart."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from typing import Any

_M_ARENA_MAX = -8  # of <malloc.h>


def share_heaps(heaps: int) -> None:
    """Lets all threads allocate from so many heaps; to be called before there are many threads.

    glibc gives each thread a heap of its own, up to eight a core. Each keeps the free pieces between its pieces in use, so that
    the process holds the sum of all peaks. Two on two cores took 2.23 GB instead of 2.6 GB, at the same speed. Nothing happens
    on systems without glibc, or where `MALLOC_ARENA_MAX` says otherwise.
    """
    glibc = _glibc()
    if glibc is not None and "MALLOC_ARENA_MAX" not in os.environ:
        glibc.mallopt(_M_ARENA_MAX, heaps)


def return_free_memory(*, circles: bool = False) -> None:
    """Gives back to the system what is free after much was dropped.

    Args:
      circles: Whether also what only refers to itself, like TensorFlow's graphs; see `spare_modules`.
    """
    if circles:
        gc.collect()
    glibc = _glibc()
    if glibc is not None:
        glibc.malloc_trim(0)


def spare_modules() -> None:
    """Leaves what there is now out of all later looks for circles; to be called once TensorFlow is there, and no model yet.

    What there is are modules, which stay. Such a look lets no other Python thread run: 0.2 s of a core where it takes in all of
    TensorFlow, so images waited for half a second at each swap; a few milliseconds without.
    """
    if not gc.get_freeze_count():
        gc.freeze()


def resident_bytes() -> int:
    """What this process has in memory; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _glibc() -> Any | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
