"""Threads that renew something periodically."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable


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
