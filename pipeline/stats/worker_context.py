"""Where a job works whose steps are in other processes than its launcher: what each of these must reach, and whom they tell."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from pipeline.errors import ModelError, OutputError
from pipeline.stats.metrics import process_counts
from pipeline.stats.worker_reports import StatsReporter
from pipeline.storage.results import check_output
from pipeline.storage.staging import is_introduced, output_of

_BEGIN_SECONDS = 900.0  # a worker that takes a lost one's place later may find that the launcher of a stream has left
_entered: set[str] = set()
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """Where a job works.

    Attributes:
      staging: The run's folder, in the results folder.
      check_model: Raises a `ModelError` where the model cannot be reached.
      launched_at: When the launcher made that folder, seconds since the epoch; 0: none did, since the job is a template's.
    """

    staging: str
    check_model: Callable[[], object]
    launched_at: float = 0.0

    def check_worker(self, figures: Callable[[], Any] | None = None) -> None:
        """Makes sure, once in each process and before it works, that it can; from then on it tells the launcher its figures.

        Args:
          figures: Gives what is told; default: `metrics.process_counts`, from now on.

        Raises:
          OutputError: The results folder cannot be written from here, or is not the launcher's.
          ModelError: The model cannot be reached from here.
        """
        with _lock:
            if self.staging in _entered:
                return
            self._check()
            if is_introduced(self.staging):
                StatsReporter(self.staging, figures or _counts_from_now()).start()
            _entered.add(self.staging)

    def _check(self) -> None:
        output, here = output_of(self.staging), f"the worker on {socket.gethostname()}"
        if abs(time.time() - self.launched_at) < _BEGIN_SECONDS and not is_introduced(self.staging):
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


def _counts_from_now() -> Callable[[], Counter[str]]:
    before = process_counts()
    return lambda: process_counts() - before
