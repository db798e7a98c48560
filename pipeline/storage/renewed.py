"""What must be renewed again and again while something lasts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def renewed(name: str, every_s: float, renew: Callable[[], bool]) -> Iterator[None]:
    """While this lasts, a thread of this name calls `renew`, until that returns False; storage may fail for a while."""
    end = threading.Event()

    def keep() -> None:
        while not end.wait(every_s):
            with contextlib.suppress(Exception):
                if not renew():
                    return

    thread = threading.Thread(target=keep, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
