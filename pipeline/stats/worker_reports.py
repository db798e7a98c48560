"""Worker reports: a heartbeat file of each worker process in the run's folder, with its `JobStats`, which the launcher reads.

Beam's own metrics come too late: a job server has those of a bundle when the bundle ends, and a bundle of a batch job may hold
all images; Flink has none before the job ends. The report of a killed worker stays, so images that another worker repeats count
twice. The summary of a batch job is made from the statistics of its rows instead.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable

from pipeline.codec import pack, unpack
from pipeline.results.run import Run
from pipeline.stats.canary import CanaryStats, merge_canaries
from pipeline.stats.process import PROCESS, ModelStats, ProcessState
from pipeline.stats.renewal import keep_renewing
from pipeline.stats.summary import JobStats
from pipeline.storage.files import make_folder, write_file
from pipeline.storage.listing import files_of
from pipeline.storage.state import read_checked

REPORT_SECONDS = 3.0
_TOUCH_SECONDS = 3600.0  # a folder of unfinished files in which nothing changes for a day counts as abandoned
_REPORTS = "figures"


def reporter_of(model: ModelStats) -> None:
    """Adds the facts of this model to the reports of this process."""
    PROCESS.model = model


class StatsReporter:
    """Writes the report of this process, as long as the run's folder exists.

    Args:
      run: The run.
      stats: Returns the statistics of this process.
      every_s: Seconds between reports.
      process: Where the model is, and where this reporter is listed.
    """

    def __init__(self, run: Run, stats: Callable[[], JobStats], every_s: float = REPORT_SECONDS, process: ProcessState = PROCESS):
        self._run = run
        self._path = f"{run.folder}/{_REPORTS}/{uuid.uuid4().hex}"
        self._stats = stats
        self._every_s = every_s
        self._process = process
        self._written, self._written_at = b"", 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Writes a report now, and then every few seconds."""
        self.flush()
        self._process.reporters.append(self.flush)
        keep_renewing("worker report", self._every_s, self._flush_again, threading.Event())

    def flush(self) -> None:
        """Writes the report if it has changed and the run's folder exists."""
        with self._lock:
            content = pack(self._process.add_model(self._stats()))
            is_new = content != self._written or time.monotonic() - self._written_at > _TOUCH_SECONDS
            if is_new and _write(self._path, content):
                self._written, self._written_at = content, time.monotonic()

    def _flush_again(self) -> bool:
        if not self._run.is_open():
            self._process.reporters.remove(self.flush)
            return False
        self.flush()
        return True


def report_all() -> None:
    """Writes the last reports of this process, which ends."""
    for flush in PROCESS.reporters:
        with contextlib.suppress(Exception):
            flush()


def _write(path: str, content: bytes) -> bool:
    """Replaces a file; returns False if its folder is gone, which this does not make again."""
    if "://" in path:
        write_file(path, content)
        return True
    unfinished = f"{path}.new"
    try:
        with open(unfinished, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except FileNotFoundError:
        return False
    return True


class WorkerReports:
    """Reads the reports of a run's workers, for its launcher.

    Args:
      run: The run, whose folder exists.
      every_s: Seconds between reports; as often this looks for new ones.
    """

    def __init__(self, run: Run, every_s: float = REPORT_SECONDS):
        self._folder = f"{run.folder}/{_REPORTS}"
        self._every_s = every_s
        self._looked = float("-inf")
        self._reports: list[JobStats] = []
        self._over = False
        make_folder(self._folder)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The allowed batch sizes of a worker's model; empty if no worker has reported them."""
        return max((report.batch_sizes for report in self.now()), default=())

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes on a worker's model; empty if no worker has reported any."""
        return max((report.model_notes for report in self.now()), default=())

    def canary_stats(self, wait_s: float = 0.0) -> CanaryStats | None:
        """Comparison of the canary with the version in use, over all workers; with `wait_s` from the last reports."""
        if wait_s and any(report.canary for report in self.now()):
            self.at_the_end()
        return merge_canaries(report.canary for report in self.now() if report.canary)

    def now(self) -> list[JobStats]:
        """The latest report of each worker; this looks for new ones every few seconds, however often it is called."""
        if not self._over and time.monotonic() - self._looked >= self._every_s:
            with contextlib.suppress(Exception):  # storage may fail for a while
                self._reports = self._look()
            self._looked = time.monotonic()
        return self._reports

    def at_the_end(self) -> list[JobStats]:
        """The last reports, after the work has ended: the first call waits until no worker writes another one."""
        if not self._over:
            before, self._reports = -1, self._look()
            while self._reports and _counted(self._reports) != before:
                before = _counted(self._reports)
                time.sleep(2 * self._every_s)  # a busy worker is late
                self._reports = self._look()
            self._over = True
        return self._reports

    def _look(self) -> list[JobStats]:
        paths = [file.path for file in files_of(self._folder) if not file.path.endswith(".new")]
        reports = (read_checked(path, functools.partial(unpack, JobStats)) for path in paths)
        return [report for report in reports if report]


def _counted(reports: Iterable[JobStats]) -> int:
    return sum(report.read + report.detected + report.failed for report in reports)
