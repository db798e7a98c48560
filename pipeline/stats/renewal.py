"""Threads that renew something periodically."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


def keep_renewing(name: str, every_s: float, renew: Callable[[], bool], end: threading.Event) -> threading.Thread:
    """Starts a thread that calls `renew` until it returns False or `end` is set. An error is ignored until the next call."""

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
    """Calls `renew` in a thread while this lasts; see `keep_renewing`."""
    end = threading.Event()
    thread = keep_renewing(name, every_s, renew, end)
    try:
        yield
    finally:
        end.set()
        thread.join()
