"""How a signal stops a batch job: its steps, which run in threads, end at their next element.

This state belongs to the process, as signals do; one job runs in a process at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

_Element = TypeVar("_Element")
_STOPPED, _CANCELLED, _DELAYED = "stopped", "cancelled", "delayed"
# setting an item is atomic, also in a signal's handler; a lock could be held by the very thread that the handler interrupts
_state: dict[str, bool] = {}


@contextlib.contextmanager
def one_run() -> Iterator[None]:
    """The time of one run, which can be stopped; the next run starts anew."""
    _state.clear()
    try:
        yield
    finally:
        _state.clear()


def stop() -> None:
    """Notes that the run was stopped, and interrupts the main thread, in which this is called, unless that is delayed.

    Raises:
      KeyboardInterrupt: It is not delayed.
    """
    _state[_STOPPED] = True
    if _DELAYED not in _state:
        raise KeyboardInterrupt


def stopped() -> bool:
    """Whether the run was stopped."""
    return _STOPPED in _state


@contextlib.contextmanager
def delayed_stop() -> Iterator[None]:
    """Delays the KeyboardInterrupt of a stop to the end of the block."""
    _state[_DELAYED] = True
    try:
        yield
    finally:
        _state.pop(_DELAYED, None)
    if stopped():
        raise KeyboardInterrupt


def cancel_steps() -> None:
    """Makes the steps that run in threads of this process end soon; their results are not wanted any more."""
    _state[_CANCELLED] = True


def steps_are_cancelled() -> bool:
    """Whether the steps shall end."""
    return _CANCELLED in _state


def until_cancelled(elements: Iterable[_Element]) -> Iterator[_Element]:
    """Yields the elements until the steps are cancelled.

    Raises:
      KeyboardInterrupt: The steps are cancelled.
    """
    for element in elements:
        if steps_are_cancelled():
            raise KeyboardInterrupt
        yield element
