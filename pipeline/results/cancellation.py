"""Stop or commit: the first of the two in this process decides, once for a run.

After a stop the run commits nothing. After the commit has begun, a stop has no effect and the run ends by itself. Steps that run
in threads of a stopped process are cancelled: they end at the next element. This state belongs to the process, as signals do; one
job runs in a process at a time.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_Element = TypeVar("_Element")
_STOPPED, _COMMITTING, _CANCELLED, _DELAYED = "stopped", "committing", "cancelled", "delayed"
# `setdefault` is atomic, also in a signal's handler; a lock could be held by the very thread that the handler interrupts
_state: dict[str, str] = {}
_confirmations: list[Callable[[], None]] = []


@contextlib.contextmanager
def one_run() -> Iterator[None]:
    """The time of one run, which can be stopped; the next run starts undecided."""
    _state.clear()
    try:
        yield
    finally:
        _state.clear()


def stop() -> bool:
    """Stops the run; returns False if the run commits already."""
    return _state.setdefault("came", _STOPPED) == _STOPPED


@contextlib.contextmanager
def delayed_stop() -> Iterator[None]:
    """Delays the KeyboardInterrupt of a stop to the end of the block."""
    _state["stop"] = _DELAYED
    try:
        yield
    finally:
        _state.pop("stop", None)
    if stopped():
        raise KeyboardInterrupt


def is_delayed() -> bool:
    """Whether a stop must not interrupt the main thread now."""
    return "stop" in _state


def stopped() -> bool:
    """Whether the run was stopped."""
    return _state.get("came") == _STOPPED


def begin_commit() -> None:
    """Decides that the run commits; later stops have no effect.

    Raises:
      KeyboardInterrupt: The run was stopped before.
    """
    if _state.setdefault("came", _COMMITTING) == _STOPPED:
        raise KeyboardInterrupt


def cancel_steps() -> None:
    """Makes the steps that run in threads of this process end soon; their results are not wanted any more."""
    _state["steps"] = _CANCELLED


def steps_are_cancelled() -> bool:
    """Whether the steps shall end."""
    return "steps" in _state


def until_cancelled(elements: Iterable[_Element]) -> Iterator[_Element]:
    """Yields the elements until the steps are cancelled.

    Raises:
      KeyboardInterrupt: The steps are cancelled.
    """
    for element in elements:
        if steps_are_cancelled():
            raise KeyboardInterrupt
        yield element


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
