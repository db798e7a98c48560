"""What must be renewed again and again while something lasts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


def keep_renewing(name: str, every_s: float, renew: Callable[[], bool], end: threading.Event) -> threading.Thread:
    """A thread of this name calls `renew`, until that returns False or `end` is set; storage may fail for a while."""

    def keep() -> None:
        while not end.wait(every_s):
            with contextlib.suppress(Exception):
                if not renew():
                    return

    thread = threading.Thread(target=keep, name=name, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def renewed(name: str, every_s: float, renew: Callable[[], bool]) -> Iterator[None]:
    """While this lasts, a thread calls `renew`; see `keep_renewing`."""
    end = threading.Event()
    thread = keep_renewing(name, every_s, renew, end)
    try:
        yield
    finally:
        end.set()
        thread.join()
