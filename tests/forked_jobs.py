"""Jobs in processes of their own, forked from one that has imported all they need, so that each starts in no time; a job can be
killed at a chosen moment, or get another signal there."""

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
_PRELOADED = ["tests.forked_jobs", "tests.forked_imports"]
_SECONDS = 240.0


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


def run_forked(
    argv: Sequence[object],
    log: Path,
    moment: Moment | None = None,
    module: str = "pipeline.run",
    errors: Path | None = None,
) -> int:
    """Runs a command line in the environment of this process; returns its exit code.

    Args:
      argv: Its arguments.
      log: What it says is added to this.
      moment: When it dies.
      module: What has the command's `main`.
      errors: Where standard error goes; default: `log`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    said = [str(log), str(errors or log)]
    job = context.Process(target=_job, args=(module, [str(value) for value in argv], said, os.getcwd(), dict(os.environ), moment))
    job.start()
    try:
        job.join(_SECONDS)
    finally:
        if job.is_alive() and job.pid:
            os.killpg(job.pid, signal.SIGKILL)
            job.join()
    assert job.exitcode is not None
    return job.exitcode


def _job(module: str, argv: list[str], said: list[str], cwd: str, environment: Mapping[str, str], moment: Moment | None) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if "STORAGE_EMULATOR_HOST" in environment:
        from apache_beam.internal.gcp import auth

        auth._Credentials._credentials_init = True  # see `emulators`
    if moment:
        _die_at(moment)
    try:
        code = importlib.import_module(module).main(argv)
    except SystemExit as end:  # argparse's
        code = end.code
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
