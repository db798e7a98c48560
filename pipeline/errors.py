"""The errors of users: one class for each thing that a user gives or that stops a run; and what each exit code means.

Each message is one line: what was expected, what came, what to do. A command prints it and exits with the code of its class.
`EXIT_CODES` says of each code whether the same command may succeed in a while. Supervisors' files are checked against it.
"""

from __future__ import annotations

import _thread
import argparse
import contextlib
import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from models.base.project import pip_install
from pipeline.log_lines import console, log_lines

SIGNALS = (signal.SIGTERM, signal.SIGINT)
DONE, FAILED, WRONG, BUSY, DEAD, DEVICE, STOPPED = 0, 1, 2, 3, 4, 5, int(128 + signal.SIGINT)
_AGAIN_SECONDS = 0.01
_OF_TENSORFLOW = ("tensorflow", "tfx_bsl", "keras")  # and tensorflow_serving: an installation may be without
_FULL_TEXTS = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


class ExitCode(NamedTuple):
    """What an exit code of a job means to whatever has started it.

    Attributes:
      meaning: What has happened, for a person.
      retry: Whether the same command may succeed in a while, so that a supervisor should start it again.
      alarm: Whether a person should hear of it, at the latest when retries have not helped.
    """

    meaning: str
    retry: bool
    alarm: bool

    @property
    def stays(self) -> bool:
        """Whether a repeat ends in the same way until a person changes something."""
        return self.alarm and not self.retry


EXIT_CODES = {
    DONE: ExitCode("done, also with some dead letters", retry=False, alarm=False),
    FAILED: ExitCode(
        "failed, and may succeed in a while: storage, Pub/Sub or a server was away, the disk was full, the job was stuck",
        retry=True,
        alarm=True,
    ),
    WRONG: ExitCode("a wrong command, config, model or place", retry=False, alarm=True),
    BUSY: ExitCode(
        "another run is processing the same images: with `--when-busy stop` at once, with `wait` after an hour, with `skip` "
        "where that run has written nothing for six hours",
        retry=False,
        alarm=True,
    ),
    DEAD: ExitCode("done, but more than `--max-dead-share` of the images have only a dead letter", retry=False, alarm=True),
    DEVICE: ExitCode("a GPU or another device failed; a new process may get it to work", retry=True, alarm=True),
    STOPPED: ExitCode("stopped by Ctrl-C or SIGTERM before a batch job was done", retry=False, alarm=False),
}


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
    """A disk is full, or the user's quota of it: the command is right, and works once there is room."""

    exit_code = FAILED

    @classmethod
    def of(cls, err: Exception, folder: str = "") -> FullError:
        """The error of a write that found no room.

        Args:
          err: What the system, Beam or TensorFlow raised; it may name a file.
          folder: Where the command writes; empty: as the error says.
        """
        named = folder or os.path.dirname(os.fsdecode(getattr(err, "filename", None) or ""))
        place = f"{named}: " if named else ""
        what = next((text for text in _FULL_TEXTS if text in str(err)), _FULL_TEXTS[0])
        return cls(f"{place}{what}; free some space, then run the same command again")


class UnreadableError(OutputError):
    """Results cannot be read now, or some of them are damaged: the command is right, and its outcome would lack rows."""

    exit_code = FAILED


class AwayError(UserError):
    """Storage, Pub/Sub or a server does not answer: the command is right, and works once it is back."""

    exit_code = FAILED


class ModelError(UserError):
    """The model is missing, or is no detector that the pipeline can run."""


class ModelAwayError(ModelError, AwayError):
    """The model's storage or server does not answer, or a version that has run cannot be loaded again now."""


class DeviceFailedError(UserError):
    """The device that detects fails on a blank image, which it could run before: no image is to blame.

    A new process may get it to work, on this machine or on another one.
    """

    exit_code = DEVICE


class ModelDeviceError(ModelError, DeviceFailedError):
    """The model fails on a blank image before it is used, and its GPU, its server or what else takes memory may be to blame."""


class RunnerError(UserError):
    """The runner cannot be reached, or cannot run this job."""


class GoesOnError(RuntimeError):
    """A launcher ends, and its job, which runs elsewhere, may go on."""


class BusyError(UserError):
    """Another run is processing the same images for the same results folder.

    Args:
      message: What to tell the user.
      holder: Who that is, as its lock has it.
    """

    exit_code = BUSY

    def __init__(self, message: str, holder: str = ""):
        super().__init__(message)
        self.holder = holder


class CommandParser(argparse.ArgumentParser):
    """A parser of a command line whose errors are one line, and which takes no shortened flags."""

    def __init__(self, **arguments: Any):
        super().__init__(allow_abbrev=False, **arguments)

    def error(self, message: str) -> NoReturn:
        """Ends the process with the exit code of a wrong command."""
        self.exit(WRONG, f"error: {message}; see {self.prog} --help\n")


def is_full(err: Exception) -> bool:
    """Whether a write found no room on its disk; Beam and TensorFlow have the system's error as text."""
    return getattr(err, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(text in str(err) for text in _FULL_TEXTS)


@log_lines()
def run_command(
    work: Callable[[], int], failed: str, stopped: str = "stopped", failed_code: int = FAILED, folder: str = ""
) -> int:
    """Runs the work of a command line. SIGTERM stops it as Ctrl-C does; an error is one line on standard error.

    Args:
      work: The work; returns an exit code.
      failed: The beginning of the line for an error that is not the user's, such as any of storage.
      stopped: The line where the work is stopped.
      failed_code: The exit code of such an error.
      folder: Where the work writes, for the line about a full disk.

    Returns:
      The exit code: that of the error's class, or 130 if the work was stopped.
    """
    is_stopped = False

    def stop() -> None:
        nonlocal is_stopped
        is_stopped = True
        raise KeyboardInterrupt

    code, line = STOPPED, ""
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
        if is_full(err):
            code, line = FullError.exit_code, f"{failed}: {FullError.of(err, folder)}"
        elif isinstance(err, ModuleNotFoundError) and (err.name or "").startswith(_OF_TENSORFLOW):
            code, line = WRONG, f"{failed}: it takes TensorFlow: {pip_install('tensorflow')}"
    console.disabled = False  # the configuration of a library's log may have disabled it
    if is_stopped or code == STOPPED:  # modules in C replace a KeyboardInterrupt by errors of their own, as pandas at its import
        console.info(stopped)
        return STOPPED
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
