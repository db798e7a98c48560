"""Reports of workers: each writes its `JobStats` into a file of the run's folder, for whoever shows the job.

Each such file is a heartbeat, too: by them the run is alive, and holds the lock of its command (`Run.goes_on`).

Beam's own metrics come too late: a job server has those of a bundle when the bundle ends, and a bundle of a batch job may hold
all images; Flink has none before the job ends. The report of a killed worker stays, so images that another worker repeats count
twice. The summary of a batch job is made from the statistics of its rows instead.

A worker whose device failed leaves a record of it in the folder, too: runners pass on only the text of an error.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import uuid
from collections.abc import Callable
from typing import Literal

import msgspec

from pipeline.codec import pack, unpack
from pipeline.errors import DeviceFailedError, UserError
from pipeline.log_lines import console
from pipeline.process import PROCESS
from pipeline.results.reader import side_by_side
from pipeline.results.run_folder import BEAT_SECONDS, FIGURES, Run
from pipeline.stats.job_stats import JobStats, merge_stats
from pipeline.storage.files import make_folder, read_checked, write_file
from pipeline.storage.listing import files_of

REPORT_SECONDS = 3.0
_LOST_SECONDS = 20.0  # a report of a worker that reads messages changes more often
_FAILURES = "failures"  # a folder
_RECENT_SECONDS = 900.0  # a job that ends of a worker's failure does so within its runner's tries; later it has another cause


class WorkerFailure(msgspec.Struct, frozen=True):
    """Why a worker has ended its process.

    Attributes:
      kind: The class of its error.
      message: The error's message.
      worker: The machine.
      at: When, in seconds since the epoch; 0 in records of earlier releases.
    """

    kind: Literal["DeviceFailedError"]
    message: str
    worker: str
    at: float = 0.0

    def write(self, run: Run) -> None:
        """Leaves it in the folder of a run."""
        write_file(f"{run.folder}/{_FAILURES}/{uuid.uuid4().hex}", pack(self), run.folder)


class StatsReporter:
    """Writes the report of this process, as long as the run is open."""

    def __init__(self, run: Run, stats: Callable[[], JobStats]):
        self._run = run
        self._path = f"{run.folder}/{FIGURES}/{uuid.uuid4().hex}"
        self._stats = stats
        self._written, self._written_at = b"", 0.0
        self._lock = threading.RLock()

    def start(self) -> None:
        """Writes a report now, and then every few seconds; `report_all` writes the last one."""
        self.flush()
        at_end.append(self.flush)
        threading.Thread(target=self._report_on, name="worker report", daemon=True).start()

    def flush(self) -> bool:
        """Writes the report if it has changed; returns False if the run is over."""
        with self._lock:
            content = pack(self._stats())
            if not self._run.is_open():
                return False
            if content != self._written or time.monotonic() - self._written_at > BEAT_SECONDS:
                write_file(self._path, content, self._run.folder)
                self._written, self._written_at = content, time.monotonic()
            return True

    def _report_on(self) -> None:
        is_open = True
        while is_open:
            time.sleep(REPORT_SECONDS)
            with contextlib.suppress(Exception):  # storage may fail for a while
                is_open = self.flush()


at_end: list[Callable[[], object]] = []  # what this process does when it ends


def report_all() -> None:
    """Writes the last reports of this process, which ends, as `deploy/flink/worker.py` does."""
    for act in at_end:
        with contextlib.suppress(Exception):
            act()


class WorkerReports:
    """Sums up the reports of a run's workers, for whoever shows it.

    Args:
      run: The run, whose folder exists.
      samples: How many annotated images the report will show.
      streaming: Whether only images with an outcome count as read: messages of the others come again, in the next run.
    """

    def __init__(self, run: Run, samples: int = 0, *, streaming: bool = False):
        self._folder, self._failures = f"{run.folder}/{FIGURES}", f"{run.folder}/{_FAILURES}"
        self._samples, self._streaming = samples, streaming
        self._looked = float("-inf")
        self._reports: list[JobStats] = []
        self._changed: dict[str, tuple[str, float]] = {}  # the generation of each report, and when it was first seen
        self._known_failures: dict[str, WorkerFailure] = {}  # by their files
        for folder in (self._folder, self._failures):
            make_folder(folder)

    def now(self) -> JobStats:
        """The sum of the latest reports; notes what the job waits for.

        This looks for new reports every few seconds, however often it is called.
        """
        if time.monotonic() - self._looked >= REPORT_SECONDS:
            with contextlib.suppress(Exception):  # storage may fail for a while
                self._reports = self._look()
                self._look_for_failures()
            self._looked = time.monotonic()
        reports = self._reports
        loading = sum(not report.batch_sizes for report in reports)
        count = "1 worker is" if loading == 1 else f"{loading} workers are"
        of_workers = f"{count} loading the model" if loading else "the model is loaded"
        PROCESS.waiting_for = of_workers if reports else "waiting for workers"
        return self._sum(reports)

    def last(self) -> JobStats:
        """The sum at the end of a job, once a busy worker, which is late, has reported."""
        time.sleep(2 * REPORT_SECONDS)
        return self.now()

    def failure(self) -> UserError | None:
        """Why a worker has ended its process lately; None if none has. A runner goes on after an earlier one."""
        with contextlib.suppress(Exception):  # then the runner's error has to do
            self._look_for_failures()
        for failure in self._known_failures.values():
            if time.time() - failure.at < _RECENT_SECONDS:
                return DeviceFailedError(f"{failure.message} (the worker on {failure.worker})")
        return None

    def _look_for_failures(self) -> None:
        """Reads new records of failures; prints each, since a runner may replace the worker and go on."""
        for file in files_of(self._failures):
            failure = None if file.path in self._known_failures else read_checked(file.path, _failure_of)
            if failure:
                self._known_failures[file.path] = failure
                console.info("the worker on %s ended: %s", failure.worker, failure.message)

    def _sum(self, reports: list[JobStats]) -> JobStats:
        stats = merge_stats(reports, self._samples)
        if self._streaming:
            stats.read = stats.detected + stats.failed + stats.skipped
        return stats

    def _look(self) -> list[JobStats]:
        """The reports that there are; that of a lost worker stays, but its last message has no age any more."""
        now, reports = time.monotonic(), []
        # one by one, hundreds take longer than they are fresh
        for file, report in side_by_side(
            lambda file: read_checked(file.path, functools.partial(unpack, JobStats)), files_of(self._folder)
        ):
            if report:
                generation, since = self._changed.get(file.path, ("", now))
                since = since if file.generation == generation else now
                self._changed[file.path] = file.generation, since
                if now - since >= _LOST_SECONDS:
                    report.backlog_age_ms = 0.0
                reports.append(report)
        return reports


_failure_of = functools.partial(unpack, WorkerFailure)
