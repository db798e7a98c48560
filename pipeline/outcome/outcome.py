"""`Outcome`, how a run has ended, and `Launched`, how it can be found while it runs: two files beside its summary.

The last step of a batch job writes the outcome. A job that fails never comes to that step; then whoever watches the job writes
it, as soon as the runner knows that the job has ended. The first outcome of a run stays.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from pipeline.errors import FAILED, UserError
from pipeline.log_lines import console, say
from pipeline.records import row_bytes
from pipeline.results.layout import JOB, OUTCOME, SUMMARY, read_summary_as
from pipeline.results.run_folder import Run
from pipeline.secrets import masked_text
from pipeline.stats.counted import COUNTED
from pipeline.stats.summary import RunFacts
from pipeline.storage.files import add_file, write_file


class Outcome(msgspec.Struct, frozen=True):
    """How a run has ended.

    Attributes:
      code: Its exit code.
      error: What its launcher prints on standard error; empty: nothing.
      lines: What it prints on standard output.
    """

    code: int
    error: str = ""
    lines: tuple[str, ...] = ()

    @staticmethod
    def of(err: Exception) -> Outcome:
        """The outcome of a job that an error has ended."""
        if isinstance(err, UserError):
            return Outcome(err.exit_code, str(err))
        return Outcome(FAILED, f"the job failed: {err}")

    def keep(self, run: Run) -> None:
        """Writes it, unless the run has one."""
        add_file(
            f"{run.reports}/{OUTCOME}", masked_text(row_bytes(msgspec.to_builtins(self), indent=2).decode()).encode() + b"\n"
        )

    def show(self, run: Run) -> int:
        """Prints it, and notes the summary for whom it is sent to; returns the exit code."""
        COUNTED.summary = read_summary_as(dict[str, Any], f"{run.reports}/{SUMMARY}") or {}
        say(self.lines)
        if self.error:
            console.error("%s", self.error)
        return self.code


@dataclasses.dataclass(frozen=True)
class Launched:
    """A job that was handed to a runner and goes on without its launcher.

    Attributes:
      runner: The runner's name.
      place: Where the runner's service is.
      job: The job's id there; empty: not known.
      run: The run.
      facts: What its launcher knew.
    """

    runner: str
    place: str
    job: str
    run: Run
    facts: RunFacts

    def write(self) -> None:
        """Writes it beside the reports of the run."""
        write_file(f"{self.run.reports}/{JOB}", row_bytes(msgspec.to_builtins(self), indent=2) + b"\n")


def outcome_of(run: Run) -> Outcome | None:
    """The outcome of a run; None if it has none yet."""
    found: Outcome | None = read_summary_as(Outcome, f"{run.reports}/{OUTCOME}")
    return found


def launched_of(run: Run) -> Launched | None:
    """How a run can be found; None if it runs in its launcher's process, or is no run."""
    found: Launched | None = read_summary_as(Launched, f"{run.reports}/{JOB}")
    return found and dataclasses.replace(found, run=run)  # the folder as it is named now, whatever stands in the file
