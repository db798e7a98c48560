"""Locks on local files (flock). The system releases them when their process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator


@contextlib.contextmanager
def if_unlocked(path: str) -> Iterator[bool]:
    """Whether no process holds a file; if so, this one holds it while this lasts.

    Raises:
      FileNotFoundError: There is no such file.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(open(path, "r+b"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, IsADirectoryError, PermissionError):  # without access to the lock it counts as held
            yield False
        else:
            yield True
