"""What made a job fail, or its service refuse it, in one line; runners raise it as text, amid much other text."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import NoReturn

from pipeline import errors
from pipeline.errors import GoesOnError, RunnerError, UserError
from pipeline.process import PROCESS
from pipeline.storage.cloud import google_error
from pipeline.storage.store import is_transient_error


def raise_cause(err: Exception, output: str = "") -> NoReturn:
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
    if named := _named_in(err):
        raise named from err
    if errors.is_full(err):
        raise errors.FullError.of(err, f"output {output}" if output else "") from err
    raise RuntimeError(last_line(err)) from err


@contextlib.contextmanager
def naming_failures(of_workers: Callable[[], UserError | None]) -> Iterator[None]:
    """Raises the error that a step has met, here or in a worker, in place of what its runner makes of it.

    Args:
      of_workers: Why a worker has ended its process. It is asked only where the runner's error names no cause of its own.
    """
    PROCESS.failure = None
    try:
        yield
    except GoesOnError:
        raise
    except Exception as err:
        names_its_own = isinstance(err, UserError) or _named_in(err)
        if failure := PROCESS.failure or (None if names_its_own else of_workers()):
            raise failure from err
        raise


def _named_in(err: Exception) -> UserError | None:
    """The error of a step that a runner's error has as text."""
    found = re.findall(r"^pipeline\.errors\.(\w+): (.*?)(?: \[while running .*)?$", str(err), re.MULTILINE)
    return getattr(errors, found[-1][0], UserError)(found[-1][1]) if found else None


def last_line(err: Exception) -> str:
    """The line of a runner's error that has the cause."""
    lines = [line.strip() for line in str(err).splitlines() if re.search(r"\w", line)]
    return (lines[-1] if lines else type(err).__name__)[:500]


@contextlib.contextmanager
def refusals_named(runner: str) -> Iterator[None]:
    """While a job is handed to a service, what the service refuses is a wrong command.

    Raises:
      RunnerError: The service refuses the job.
    """
    from google.api_core.exceptions import ClientError

    try:
        yield
    except ClientError as err:
        if is_transient_error(google_error(err)):
            raise
        said = re.sub(r"^[A-Z]+ http\S+: ", "", str(err.message))
        raise RunnerError(f"{runner} refuses the job: {' '.join(said.split())[:500]}") from err
