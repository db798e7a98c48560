"""`COUNTED`, what the steps of this process count, and the facts of its model."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.stats.job_stats import JobStats

_BACKLOG_SECONDS = 20.0  # after the last message, the backlog has no age


class Counted:
    """The statistics of a process; thread-safe.

    Attributes:
      stats: Statistics that grow with each count of this process; guarded by `lock`.
      lock: For a moment only.
      model_stats: Gives the facts of the model in use, and the figures of its canary.
      model_events: What happened to the model's versions, by the name of the Beam counter; guarded by `lock`.
      samples: How many images with a thumbnail the statistics keep, for the report of a stream and the live page.
      message_at: When a stream read its last message, in monotonic seconds.
      undelivered: Messages of a stream's subscription that nobody has received; None: unknown.
      summary: The content of the last job's summary.json; empty before its end.
    """

    def __init__(self) -> None:
        self.stats: list[JobStats] = []
        self.lock = threading.Lock()
        self.model_stats: Callable[[], JobStats] = JobStats
        self.model_events: Counter[str] = Counter()
        self.samples = 0
        self.message_at = -math.inf
        self.undelivered: int | None = None
        self.summary: dict[str, Any] = {}

    def begin_counting(self) -> JobStats:
        """Statistics to which the steps of this process add all that they count from now on."""
        stats = JobStats()
        with self.lock:
            self.stats.append(stats)
        return stats

    @contextlib.contextmanager
    def counting(self) -> Iterator[JobStats]:
        """Yields statistics of what the steps of this process count while the block lasts."""
        stats = self.begin_counting()
        try:
            yield stats
        finally:
            with self.lock:
                self.stats = [each for each in self.stats if each is not stats]

    def stats_of(self, counted: JobStats) -> JobStats:
        """A consistent copy of statistics that threads are adding to, with the facts of this process's model."""
        model = self.model_stats()
        with self.lock:
            stats = counted.copy()
            stats.model_events = self.model_events.copy()
            if time.monotonic() - self.message_at > _BACKLOG_SECONDS:
                stats.backlog_age_ms = 0.0
        stats.take_model(model)
        return stats


COUNTED = Counted()
