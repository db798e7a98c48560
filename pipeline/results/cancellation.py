"""Stop or commit: the first of the two in this process decides, once for a run.

After a stop the run commits nothing. After the commit has begun, a stop has no effect and the run ends by itself. This state
belongs to the process, as signals do; one job runs in a process at a time.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

_STOPPED, _COMMITTING = "stopped", "committing"
# `setdefault` is atomic, also in a signal's handler; a lock could be held by the very thread that the handler interrupts
_first: dict[str, str] = {}
_confirmations: list[Callable[[], None]] = []


@contextlib.contextmanager
def one_run() -> Iterator[None]:
    """The time of one run, which can be stopped; the next run starts undecided."""
    _first.clear()
    try:
        yield
    finally:
        _first.clear()


def stop() -> bool:
    """Stops the run; returns False if the run commits already."""
    return _first.setdefault("came", _STOPPED) == _STOPPED


def stopped() -> bool:
    """Whether the run was stopped."""
    return _first.get("came") == _STOPPED


def begin_commit() -> None:
    """Decides that the run commits; later stops have no effect.

    Raises:
      KeyboardInterrupt: The run was stopped before.
    """
    if _first.setdefault("came", _COMMITTING) == _STOPPED:
        raise KeyboardInterrupt


def stop_from_thread() -> None:
    """Stops the job as SIGTERM does; to be called in a thread that is not the main one."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)  # a running thread has an ident


@contextlib.contextmanager
def confirmed_before_commit(confirm: Callable[[], None]) -> Iterator[None]:
    """While this lasts, a run in this process commits only if `confirm` does not raise."""
    _confirmations.append(confirm)
    try:
        yield
    finally:
        _confirmations.remove(confirm)


def confirm_commit() -> None:
    """Makes sure that the run may still commit.

    Raises:
      TakenOverError: Another run took over.
    """
    for confirm in _confirmations:
        confirm()
