"""The errors of users: one class for each thing that a user gives or that stops a run.

Each message is one line: what was expected, what came, what to do. A command prints it and exits with the code of its class.
"""

from __future__ import annotations

import _thread
import argparse
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

from pipeline.log_lines import console, log_lines

DONE, FAILED, WRONG, BUSY = 0, 1, 2, 3  # exit codes
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOPPED = 128 + signal.SIGINT
_AGAIN_SECONDS = 0.01


class UserError(Exception):
    """The user must change something; the message names it."""

    exit_code = WRONG


class ConfigError(UserError):
    """The config file or a flag is wrong."""


class InputError(UserError):
    """An input names nothing readable."""


class OutputError(UserError):
    """The output cannot be written."""


class FullError(OutputError):
    """The output's disk is full, or the user's quota of it: the command is right, and works once there is room."""

    exit_code = FAILED


class StorageAwayError(UserError):
    """The store of the images has not answered for long: the command is right, and works once the store is back."""

    exit_code = FAILED


class ModelError(UserError):
    """The model is missing, or is no detector that the pipeline can run."""


class RunnerError(UserError):
    """The runner cannot be reached, or cannot run this job."""


class BusyError(UserError):
    """Another run is processing the same images for the same results folder."""

    exit_code = BUSY


class CommandParser(argparse.ArgumentParser):
    """A parser of a command line whose errors are one line, and which takes no shortened flags."""

    def __init__(self, **arguments: Any):
        super().__init__(allow_abbrev=False, **arguments)

    def error(self, message: str) -> NoReturn:
        """Ends the process with the exit code of a wrong command."""
        self.exit(WRONG, f"error: {message}; see {self.prog} --help\n")


@log_lines()
def run_command(work: Callable[[], int], failed: str, stopped: str = "stopped", failed_code: int = FAILED) -> int:
    """Runs the work of a command line. SIGTERM stops it as Ctrl-C does; an error is one line on standard error.

    Args:
      work: The work; returns an exit code.
      failed: The beginning of the line for an error that is not the user's, such as any of storage.
      stopped: The line where the work is stopped.
      failed_code: The exit code of such an error.

    Returns:
      The exit code: that of the error's class, or 130 if the work was stopped.
    """
    is_stopped = False

    def stop() -> None:
        nonlocal is_stopped
        is_stopped = True
        raise KeyboardInterrupt

    code, line = _STOPPED, ""
    has_ctrl_c = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job ignores it
    try:
        with signals_call(stop, SIGNALS if has_ctrl_c else (signal.SIGTERM,)):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            return work()
    except KeyboardInterrupt:
        pass
    except UserError as err:
        code, line = err.exit_code, str(err)
    except Exception as err:  # whatever storage says, the user gets one line
        logging.getLogger(__name__).info(failed, exc_info=err)
        code, line = failed_code, f"{failed}: {' '.join(str(err).split())[:500]}"
    console.disabled = False  # the configuration of a library's log may have disabled it
    if is_stopped or code == _STOPPED:  # modules in C replace a KeyboardInterrupt by errors of their own, as pandas at its import
        console.info(stopped)
        return _STOPPED
    console.error("%s", line)
    return code


@contextlib.contextmanager
def signals_call(act: Callable[[], None], numbers: Sequence[int] = SIGNALS) -> Iterator[None]:
    """While this lasts, signals with these numbers call `act`, which may raise."""

    def called(number: int, frame: FrameType | None) -> None:
        if not _comes_again(number, frame):
            act()

    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers:
            signal.signal(number, called)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: set by another language than Python


def _comes_again(number: int, frame: FrameType | None) -> bool:
    """Whether a signal comes while its handler must not raise; it is then sent again in a moment.

    A `threading.Condition`, as futures and queues have one, that is being entered would stay locked. Who then waits for it, such
    as the end of a pool of threads, never ends (https://github.com/python/cpython/issues/74174).
    """
    if frame is None or frame.f_code is not threading.Condition.__enter__.__code__:
        return False
    _thread.start_new_thread(_send_again, (number,))  # a `threading.Thread` takes locks to start
    return True


def _send_again(number: int) -> None:
    time.sleep(_AGAIN_SECONDS)
    os.kill(os.getpid(), number)
