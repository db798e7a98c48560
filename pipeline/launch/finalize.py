"""The end of a job as its launcher sees it: the one line for a failure, and signals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import NoReturn

from pipeline import errors
from pipeline.errors import SIGNALS, RunnerError, UserError, signals_call
from pipeline.log_lines import write_unlocked
from pipeline.process import PROCESS
from pipeline.storage.cloud import google_error
from pipeline.storage.store import is_transient_error


def failed(err: Exception, output: str = "") -> NoReturn:
    """Raises what made a job fail; Beam's runners return exceptions of its steps as text.

    Args:
      err: What a runner raised.
      output: Where the job writes, for the line about a full disk.

    Raises:
      UserError: The job failed for the user's input.
      KeyboardInterrupt: The job was stopped.
      RuntimeError: It failed for another reason, which the message has in one line.
    """
    if PROCESS.stopped or last_line(err).startswith("KeyboardInterrupt"):
        raise KeyboardInterrupt from err
    if isinstance(err, UserError):
        raise err
    found = re.findall(r"^pipeline\.errors\.(\w+): (.*?)(?: \[while running .*)?$", str(err), re.MULTILINE)
    for name, message in found[-1:]:
        raise getattr(errors, name, UserError)(message) from err
    if errors.is_full(err):
        raise errors.FullError.of(err, f"output {output}" if output else "") from err
    raise RuntimeError(last_line(err)) from err


def last_line(err: Exception) -> str:
    """The line of a runner's error that has the cause."""
    lines = [line.strip() for line in str(err).splitlines() if re.search(r"\w", line)]
    return (lines[-1] if lines else type(err).__name__)[:500]


@contextlib.contextmanager
def stopped_by_signals(output: str = "") -> Iterator[None]:
    """While this lasts, the first SIGTERM or SIGINT stops the job by a KeyboardInterrupt; the next ends the process.

    For what else it raises, see `failed`.
    """

    def stop() -> None:
        PROCESS.stopped = True
        _next_signal_ends_the_process()  # a store that is away may keep the job for minutes
        raise KeyboardInterrupt

    with signals_call(stop):
        try:
            yield
        except Exception as err:  # noqa: BLE001  the user gets one line for any error
            failed(err, output)
        finally:
            PROCESS.stopped = False


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
def submitting(runner: str) -> Iterator[None]:
    """While a job is handed to a service, a signal is noted, and what the service refuses is a wrong command.

    Raises:
      RunnerError: The service refuses the job.
    """
    from google.api_core.exceptions import ClientError

    with signals_noted("the job is being submitted, and is ended once its id is there"):
        try:
            yield
        except ClientError as err:
            if is_transient_error(google_error(err)):
                raise
            said = re.sub(r"^[A-Z]+ http\S+: ", "", str(err.message))
            raise RunnerError(f"{runner} refuses the job: {' '.join(said.split())[:500]}") from err


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


def _next_signal_ends_the_process() -> None:
    """The kernel ends it, except the first process of a container, to which it gives no signal that has no handler."""
    for number in SIGNALS:
        signal.signal(number, _end_process if os.getpid() == 1 else signal.SIG_DFL)


def _end_process(number: int, _frame: object) -> None:
    os._exit(128 + number)
