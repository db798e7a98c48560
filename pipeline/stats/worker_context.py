"""`WorkerContext`: checks in each worker process that it reaches the results folder and the model, and starts its reports."""

from __future__ import annotations

import dataclasses
import functools
import socket
import time
from collections.abc import Callable

from pipeline.errors import ModelError, OutputError
from pipeline.results.layout import check_output
from pipeline.results.run import Run
from pipeline.stats.process import PROCESS, ProcessState
from pipeline.stats.summary import JobStats
from pipeline.stats.worker_reports import StatsReporter

_BEGIN_SECONDS = 900.0  # a worker that replaces a lost one much later may find that the launcher of a stream has left


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """What the workers of a job must reach.

    Attributes:
      run: The run.
      check_model: Raises a `ModelError` if the model cannot be reached.
      launched_at: When the launcher made its folder, seconds since the epoch; 0: the job is a template's and has no launcher.
      watch: Begins to watch the worker process, where a stuck one is ended.
    """

    run: Run
    check_model: Callable[[], object]
    launched_at: float = 0.0
    watch: Callable[[], object] | None = None

    def check_worker(self, figures: Callable[[], JobStats] | None = None, process: ProcessState = PROCESS) -> None:
        """Checks, once in each process and before it works, what it can reach; then starts its reports to the launcher.

        Args:
          figures: Returns the statistics to report; default: all that this process counts from now on.
          process: The state of this process.

        Raises:
          OutputError: This worker cannot write to the results folder, or finds another folder than the launcher's.
          ModelError: This worker cannot reach the model.
        """
        with process.entering:
            if self.run.folder in process.entered:
                return
            self._check()
            if self.run.is_open():
                own = JobStats()
                if not figures:
                    process.begin_counting(own)
                StatsReporter(self.run, figures or functools.partial(process.copy_of, own), process=process).start()
            if self.watch:
                self.watch()
            process.entered.add(self.run.folder)

    def _check(self) -> None:
        output, here = self.run.output, f"the worker on {socket.gethostname()}"
        if abs(time.time() - self.launched_at) < _BEGIN_SECONDS and not self.run.is_open():
            raise OutputError(
                f"output {output}: expected a folder that launcher and workers share, such as gs://<bucket>/<folder>, but {here} "
                "does not find in it what the launcher has begun"
            )
        try:
            check_output(output)
        except OutputError as err:
            raise OutputError(f"{err} ({here})") from err
        try:
            self.check_model()
        except Exception as err:
            raise ModelError(f"{' '.join(str(err).split())[:400]} ({here})") from err
