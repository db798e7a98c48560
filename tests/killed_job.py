"""Batch jobs in processes of their own that are killed at a chosen moment, forked from one that has imported all they need."""

from __future__ import annotations

import errno
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

KILLED = -signal.SIGKILL
_PRELOADED = ["tests.killed_job", "tests.killed_imports"]


class Moment(NamedTuple):
    """When a job dies, or gets another signal: at a call of a function of the pipeline.

    Attributes:
      place: `module:name` or `module:Class.name`, as the caller finds it.
      number: Which of its calls.
      when: `before`, `after`, or `amid`: of several files to be renamed, or copied, the first half is. `full`: no
        space is left on the device, which it survives.
      having: Only calls count that have this in their arguments.
      sent: The signal that it gets. One that lets it live lets the call happen.
    """

    place: str
    number: int = 1
    when: str = "before"
    having: str = ""
    sent: signal.Signals = signal.SIGKILL


def run_job(argv: Sequence[object], log: Path, moment: Moment | None = None, module: str = "pipeline.run") -> int:
    """Runs a command line; returns its exit code. What it says is added to `log`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    job = context.Process(target=_job, args=(module, [str(value) for value in argv], str(log), emulator, moment))
    job.start()
    job.join()
    assert job.exitcode is not None
    return job.exitcode


def _job(module: str, argv: list[str], log: str, emulator: str, moment: Moment | None) -> None:
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    if emulator:
        from apache_beam.internal.gcp import auth

        auth._Credentials._credentials_init = True  # see `emulators`
        os.environ.update(STORAGE_EMULATOR_HOST=emulator, NO_GCE_CHECK="true")
    if moment:
        _die_at(moment)
    code = importlib.import_module(module).main(argv)
    sys.stdout.flush()
    os._exit(code)


def _die_at(moment: Moment) -> None:
    module, _, name = moment.place.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = name.split(".")
    for each in classes:
        owner = getattr(owner, each)
    left, function = [moment.number], getattr(owner, name)

    # Beam looks at the arguments of a DoFn's methods
    def called(*args: Any, **kwargs: Any) -> Any:
        left[0] -= moment.having in f"{args} {kwargs}"
        if left[0]:
            return function(*args, **kwargs)
        left[0] = -1
        _WHEN[moment.when](function, args, kwargs)
        os.kill(os.getpid(), moment.sent)
        return function(*args, **kwargs)

    called.__wrapped__ = function  # type: ignore[attr-defined]
    setattr(owner, name, staticmethod(called) if classes and isinstance(owner.__dict__.get(name), staticmethod) else called)


def _half(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    function(*map(_first_half, args), **kwargs)


def _first_half(arg: Any) -> Any:
    if isinstance(arg, dict):
        return dict(_first_half(list(arg.items())))
    return arg[: (len(arg) + 1) // 2] if isinstance(arg, list) else arg


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


_WHEN: dict[str, Callable[..., object]] = {
    "before": lambda function, args, kwargs: None,
    "after": lambda function, args, kwargs: function(*args, **kwargs),
    "amid": _half,
    "full": _full,
}
