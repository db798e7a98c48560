"""A worker of a job elsewhere: what it checks before it works, and what it does when its device fails."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import time
from collections.abc import Callable

from pipeline.errors import ModelError, OutputError, RunnerError, UserError
from pipeline.log_lines import console
from pipeline.process import PROCESS
from pipeline.results.layout import check_output
from pipeline.results.run_folder import Run
from pipeline.software import Software, here
from pipeline.stats.counted import COUNTED
from pipeline.stats.worker_reports import StatsReporter, WorkerFailure


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """What the workers of a job must reach.

    Attributes:
      run: The run.
      check_model: Raises a `ModelError` if the model cannot be reached.
      watch: Begins to watch the worker process, where a stuck one is ended.
      software: The launcher's versions.
    """

    run: Run
    check_model: Callable[[], object]
    watch: Callable[[], object] | None = None
    software: Software = dataclasses.field(default_factory=here)

    def check_worker(self) -> None:
        """Checks, once in each process and before it works, what it can reach; then reports to the launcher what it counts.

        Raises:
          OutputError: This worker cannot write to the results folder, or finds another folder than the launcher's.
          ModelError: This worker cannot reach the model.
          RunnerError: This worker has other versions than the launcher.
        """
        with PROCESS.entering:
            if self.run.folder in PROCESS.entered:
                return
            self._check()
            if self.run.is_open():
                StatsReporter(self.run, functools.partial(COUNTED.stats_of, COUNTED.begin_counting())).start()
            if self.watch:
                self.watch()
            PROCESS.on_failure = self._end_after
            PROCESS.entered.add(self.run.folder)

    def _end_after(self, failure: UserError) -> None:
        """Leaves the record of a failure of this worker's device, and ends its process."""
        record = WorkerFailure("DeviceFailedError", str(failure), socket.gethostname(), time.time())
        with contextlib.suppress(Exception):  # the process ends anyway
            record.write(self.run)
        console.error("%s", failure)
        os._exit(failure.exit_code)

    def _check(self) -> None:
        output, worker = self.run.output, f"the worker on {socket.gethostname()}"
        if not self.software.fits(here()):
            raise RunnerError(
                f"the launcher has {self.software}, and {worker} has {here()}: expected the same; build its image anew"
            )
        if not (self.run.is_open() or self.run.has_outcome()):
            raise OutputError(
                f"output {output}: expected a folder that launcher and workers share, such as gs://<bucket>/<folder>, but "
                f"{worker} does not find in it what the launcher has begun"
            )
        try:
            check_output(output)
        except OutputError as err:
            raise OutputError(f"{err} ({worker})") from err
        try:
            self.check_model()
        except Exception as err:
            kind = type(err) if isinstance(err, ModelError) else ModelError
            raise kind(f"{' '.join(str(err).split())[:400]} ({worker})") from err
