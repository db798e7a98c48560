"""What the first SIGTERM or SIGINT does to a job, in each of its phases; the second one ends the process."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from pipeline.errors import SIGNALS, signals_call
from pipeline.log_lines import write_unlocked
from pipeline.process import PROCESS
from pipeline.runners.cause import raise_cause

_LATE_SECONDS = 5.0  # most jobs have ended by then


@contextlib.contextmanager
def stopped_by_signals(output: str = "") -> Iterator[None]:
    """While this lasts, the first SIGTERM or SIGINT stops the job by a KeyboardInterrupt; the next ends the process.

    For what else it raises, see `raise_cause`.
    """
    ended = threading.Event()

    def stop() -> None:
        PROCESS.stopped = True
        _thread.start_new_thread(_tell_if_late, (ended,))  # a `threading.Thread` takes locks to start
        _next_signal_ends_the_process()  # a store that is away may keep the job for minutes
        raise KeyboardInterrupt

    with signals_call(stop):
        try:
            yield
        except Exception as err:  # noqa: BLE001  the user gets one line for any error
            raise_cause(err, output)
        finally:
            PROCESS.stopped = False
            ended.set()


@contextlib.contextmanager
def finished_by_signals(end: Callable[[], None]) -> Iterator[None]:
    """While this lasts, the first SIGTERM or SIGINT calls `end`, and the job finishes what it has; the next ends the process."""

    def stop() -> None:
        end()
        _next_signal_ends_the_process()
        write_unlocked("stopping: finishing in-flight images")

    with signals_call(stop):
        yield


@contextlib.contextmanager
def signals_noted(what: str) -> Iterator[None]:
    """While this lasts, the first SIGTERM or SIGINT is only noted, and comes again at its end; the next ends the process.

    Args:
      what: What cannot be left halfway, for the person who waits for it.
    """
    noted: list[int] = []

    def note(number: int, _frame: object) -> None:
        noted.append(number)
        _next_signal_ends_the_process()
        write_unlocked(f"stopping: {what}")

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if noted:
            os.kill(os.getpid(), noted[0])


def _tell_if_late(ended: threading.Event) -> None:
    if not ended.wait(_LATE_SECONDS):
        write_unlocked("stopping: calls under way end first, within a minute if storage hangs; a second signal ends the process")


def _next_signal_ends_the_process() -> None:
    """The kernel ends it, except the first process of a container, to which it gives no signal that has no handler."""
    for number in SIGNALS:
        signal.signal(number, _end_process if os.getpid() == 1 else signal.SIG_DFL)


def _end_process(number: int, _frame: object) -> None:
    os._exit(128 + number)
