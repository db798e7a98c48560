"""`PROCESS`, the one mutable object that this package shares within a process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from pipeline.stats.canary import CanaryStats
from pipeline.stats.summary import JobStats


class ModelStats(Protocol):
    """Facts of the model in use: from the detector of this process, or from the reports of a launcher's workers."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The allowed batch sizes; empty if unknown."""

    def canary_stats(self, wait_s: float = 0.0) -> CanaryStats | None:
        """Comparison of the canary with the version in use; waits up to so many seconds for images that it still works at."""


class ProcessState:
    """What the steps of a process share; thread-safe.

    Attributes:
      counting: Statistics that grow with each count of this process; guarded by `lock`.
      lock: For a moment only.
      waiting_for: What the job waits for while no image is done; empty: nothing.
      model: The model in use.
      model_events: What happened to its versions, by the name of the Beam counter; guarded by `lock`.
      entered: Staging folders of the runs that this process has joined as a worker; guarded by `entering`.
      entering: Held while a worker checks what it can reach.
      reporters: Each writes the report of this process for one run.
    """

    def __init__(self) -> None:
        self.counting: list[JobStats] = []
        self.lock = threading.Lock()
        self.waiting_for = ""
        self.model: ModelStats | None = None
        self.model_events: Counter[str] = Counter()
        self.entered: set[str] = set()
        self.entering = threading.Lock()
        self.reporters: list[Callable[[], None]] = []

    def begin_counting(self, stats: JobStats) -> None:
        """Adds to these statistics all that the steps of this process count from now on."""
        with self.lock:
            self.counting.append(stats)

    def end_counting(self, stats: JobStats) -> None:
        """Adds nothing more to these statistics."""
        with self.lock:
            self.counting = [each for each in self.counting if each is not stats]

    def copy_of(self, stats: JobStats) -> JobStats:
        """A consistent copy of statistics that threads are adding to."""
        with self.lock:
            return stats.copy()

    def add_model(self, stats: JobStats) -> JobStats:
        """The same statistics with the facts of this process's model."""
        if self.model:
            stats.batch_sizes, stats.canary = self.model.batch_sizes, self.model.canary_stats()
        with self.lock:
            stats.model_events = self.model_events.copy()
        return stats


PROCESS = ProcessState()
