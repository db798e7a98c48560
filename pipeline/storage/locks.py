"""Locks on local files (flock). The system releases them when their process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from pipeline.errors import OutputError


@contextlib.contextmanager
def locked_file(path: str, content: bytes = b"") -> Iterator[None]:
    """Makes a file and keeps it locked; no other process ever sees it without the lock.

    Raises:
      OutputError: The disk has no locks.
    """
    with open(f"{path}.new", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as err:
            raise OutputError(f"output {path}: expected a disk with file locks, which keep two jobs apart, but: {err}") from err
        lock.write(content)
        lock.flush()
        os.rename(lock.name, path)
        yield


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


@contextlib.contextmanager
def one_at_a_time(folder: str) -> Iterator[None]:
    """Lets one process at a time work in a local folder; no effect on object storage, and on disks that lock only files (NFS)."""
    with contextlib.ExitStack() as stack:
        if "://" not in folder:
            held = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, held)
            with contextlib.suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_EX)
        yield
