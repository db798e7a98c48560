"""Locks on local files, which the system takes back when a process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator


@contextlib.contextmanager
def locked_file(path: str, content: bytes = b"") -> Iterator[None]:
    """Makes a file and holds it; nobody finds it without its lock."""
    with open(f"{path}.new", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(content)
        lock.flush()
        os.rename(lock.name, path)
        yield


@contextlib.contextmanager
def if_unlocked(path: str) -> Iterator[bool]:
    """Whether nobody holds a file; if so, nobody else finds that out while this lasts.

    Raises:
      FileNotFoundError: There is no such file.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(open(path, "r+b"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, IsADirectoryError, PermissionError):  # who may not look takes nothing away
            yield False
        else:
            yield True


@contextlib.contextmanager
def one_at_a_time(folder: str) -> Iterator[None]:
    """Of several processes that come here for a local folder, one goes on after the other; elsewhere all do."""
    with contextlib.ExitStack() as stack:
        if "://" not in folder:
            held = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, held)
            with contextlib.suppress(OSError):  # a network disk that has no locks for folders
                fcntl.flock(held, fcntl.LOCK_EX)
        yield
