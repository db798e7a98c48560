"""Work in a thread of its own, for as long as a block lasts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def in_background(name: str, work: Callable[[threading.Event], object]) -> Iterator[None]:
    """Runs `work` in a thread while the block lasts; the event is set at the end of the block, which waits for the thread."""
    left = threading.Event()
    thread = threading.Thread(target=work, args=(left,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
