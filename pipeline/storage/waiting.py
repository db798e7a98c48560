"""A notice for users whose storage does not answer: clients try again for two minutes before they fail."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from pipeline.log_lines import console

_SECONDS = 3.0


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Logs one line if this takes longer than a few seconds; `what` names the service."""
    notice = f"waiting for {what}, which has not answered for {_SECONDS:g} s"
    timer = threading.Timer(_SECONDS, console.info, [notice])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
