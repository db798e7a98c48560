"""Whether a job that is told to stop still can: until its results begin to get their names; from then on it ends by itself.

Who comes first decides, once for a run: a stop, after which nothing is published, or publishing, after which nothing stops.
Signals belong to the process, and so does this; one job runs in a process at a time.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

_STOPPED, _PUBLISHING = "stopped", "publishing"
# `setdefault` is one step, also for a signal's handler; a lock could be held by the very thread that the handler interrupts
_first: dict[str, str] = {}
_asked: list[Callable[[], None]] = []


@contextlib.contextmanager
def one_run() -> Iterator[None]:
    """A run, which can be stopped; what came of it is not the next one's."""
    _first.clear()
    try:
        yield
    finally:
        _first.clear()


def stop() -> bool:
    """Stops the run; returns whether it does, or else publishes."""
    return _first.setdefault("came", _STOPPED) == _STOPPED


def begin_publishing() -> None:
    """Says that from here on the run has results, and ends by itself.

    Raises:
      KeyboardInterrupt: It was stopped before.
    """
    if _first.setdefault("came", _PUBLISHING) == _STOPPED:
        raise KeyboardInterrupt


def stop_from_thread() -> None:
    """Stops the job as SIGTERM does, from another thread than the main one."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)  # a running thread has an ident


@contextlib.contextmanager
def asked_before_publishing(confirm: Callable[[], None]) -> Iterator[None]:
    """While this lasts, a run in this process publishes only where `confirm` does not raise."""
    _asked.append(confirm)
    try:
        yield
    finally:
        _asked.remove(confirm)


def confirm_publishing() -> None:
    """Asks whether the run may still publish.

    Raises:
      TakenOverError: It may not, since another run took over.
    """
    for confirm in _asked:
        confirm()
