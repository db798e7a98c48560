"""Says what a command waits for where storage does not answer: its clients try again for two minutes before they give up."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

_SECONDS = 3.0


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """While this lasts, and it lasts for seconds, one line says what for."""

    def say() -> None:
        print(f"waiting for {what}, which has not answered for {_SECONDS:g} s", file=sys.stderr, flush=True)

    timer = threading.Timer(_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
