"""Whether a job that is told to stop still can: until its results begin to get their names; from then on it ends by itself.

Who comes first decides, once for a run: a stop, after which nothing is published, or publishing, after which nothing stops.
Signals belong to the process, and so does this; one job runs in a process at a time.
"""

from __future__ import annotations

_STOPPED, _PUBLISHING = "stopped", "publishing"
# `setdefault` is one step, also for a signal's handler; a lock could be held by the very thread that the handler interrupts
_first: dict[str, str] = {}


def begin() -> None:
    """Begins a run: it can be stopped."""
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
