"""Jobs in processes of their own, forked from one that has imported all they need, so that each starts in no time.

A job may be killed, or lose its storage, at a call of a function (`Moment`).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib
import multiprocessing
import os
import pkgutil
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

KILLED = -signal.SIGKILL
_PRELOADED = [  # what a batch job imports on its way; imported once, for all that are forked afterwards
    *("tests.without_keras", "apache_beam.runners.direct.direct_runner", "pipeline.run", "pipeline.commands.compact"),
    *("tests.forked_jobs", "pipeline.detect.load_model", "pipeline.launch.batch", "pipeline.runners.in_memory"),
    "pipeline.report.page",
]
_handled = threading.Event()
_SECONDS = 580.0  # no test depends on it: a job that takes as long has hung


class Moment(NamedTuple):
    """When a job is killed, gets another signal, or has no storage any more: at a call of a function.

    Attributes:
      place: `module:name` or `module:Class.name`, as the caller finds it; of the pipeline, or such as `os:replace`.
      number: Which of its calls.
      when: `before` or `after` it. `fails`: instead; this call and all later ones find no space left on the device.
      having: Only calls count in whose arguments, as text, this regular expression is found.
      sent: The signal. One that lets the job live lets the call happen.
    """

    place: str
    number: int = 1
    when: str = "before"
    having: str = ""
    sent: signal.Signals = signal.SIGKILL


class ForkedJob:
    """A job that was started: `main` of a module with arguments. Its process leads a group of its own, which ends with the block.

    What it prints is added to `log`, or its standard error to `errors`; `environment` adds to the variables of this process.
    """

    def __init__(
        self,
        argv: Sequence[object],
        log: Path,
        at: Moment | None = None,
        module: str = "pipeline.run",
        errors: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        printed, variables = [str(log), str(errors or log)], {**os.environ, **(environment or {})}
        arguments = (module, [str(value) for value in argv], printed, os.getcwd(), variables, at)
        self._process = context.Process(target=_job, args=arguments)
        self._process.start()

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process.pid
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float = _SECONDS) -> int:
        """Waits for its end; returns its exit code."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"job {self.pid}", timeout)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills its group, unless it has ended, and waits for that."""
        if self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):  # it leads none yet
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()

    def __enter__(self) -> ForkedJob:
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()


def run_forked(*arguments: Any, **how: Any) -> int:
    """Runs a job, with the arguments of `ForkedJob`; returns its exit code."""
    with ForkedJob(*arguments, **how) as job:
        return job.wait()


def _job(module: str, argv: list[str], printed: list[str], cwd: str, environment: Mapping[str, str], at: Moment | None) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    signal.signal(signal.SIGRTMIN, lambda *_: _handled.set())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background, and its children, ignore it
    if "STORAGE_EMULATOR_HOST" in environment:
        from apache_beam.internal.gcp import auth

        auth._Credentials._credentials_init = True  # see `emulators`
    if at:
        _happen_at(at)
    try:
        code = importlib.import_module(module).main(argv)
    except SystemExit as end:  # argparse's
        code = end.code
    _end_with(code)


def _end_with(code: int) -> None:
    """Ends this process as the interpreter does: threads that are no daemons are waited for, and exit handlers run."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _happen_at(moment: Moment) -> None:
    place, _, name = moment.place.replace(":", ".").rpartition(".")
    owner = pkgutil.resolve_name(place)
    left, function = moment.number, getattr(owner, name)

    # Beam looks at the arguments of a DoFn's methods
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        is_meant = re.search(moment.having, f"{args} {kwargs}") is not None
        left -= is_meant
        if is_meant and left <= 0 and moment.when == "fails":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if is_meant and left == 0:
            if moment.when == "after":
                function(*args, **kwargs)
            _signal(moment.sent)
        return function(*args, **kwargs)

    called.__wrapped__ = function  # type: ignore[attr-defined]
    setattr(owner, name, staticmethod(called) if isinstance(vars(owner).get(name), staticmethod) else called)


def _signal(sent: signal.Signals) -> None:
    """Sends this process a signal; returns when its handler has run, which Python does in the main thread."""
    if threading.current_thread() is threading.main_thread() or sent == signal.SIGKILL:
        os.kill(os.getpid(), sent)
        return
    _handled.clear()
    os.kill(os.getpid(), sent)
    while not _handled.is_set():  # one that comes just before the main thread waits does not wake it
        os.kill(os.getpid(), signal.SIGRTMIN)  # Python runs handlers in the order of their numbers
        _handled.wait(0.05)
