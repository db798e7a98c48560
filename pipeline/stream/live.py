"""The statistics of a streaming job while it runs, and the text of its progress lines.

A stream has no end at which a runner could return a result. So each process keeps its own `JobStats`, and workers write theirs
to report files, which the launcher reads. All of them are bounded, since a stream runs for months. The same counts are Beam
metrics (`pipeline.stats.metrics`).
"""

from __future__ import annotations

import threading
import time

from pipeline.records import DeadLetter, DetectedImage
from pipeline.stats import metrics
from pipeline.stats.histogram import Times
from pipeline.stats.job_stats import JobStats, merge_stats
from pipeline.stats.worker_reports import WorkerReports
from pipeline.stream.messages import Request

_BACKLOG_SECONDS = 20.0


class _Lines:
    """Progress lines, each about the time since the one before."""

    _before = JobStats()

    def _next_line(self, now: JobStats, seconds: float) -> str:
        before, self._before = self._before, now
        detected, batches = now.detected - before.detected, now.batches - before.batches
        text = f"{now.detected} images, {detected / max(seconds, 1e-9):.1f} images/s"
        if detected:
            images = sum(size * number for size, number in batches.items())
            text += f", batches of {images / max(batches.total(), 1):.1f}"
            text += f", event-to-publish {_shown(now.publish_latencies.since(before.publish_latencies))}"
            text += f", in-hand-to-result {_shown(now.latencies.since(before.latencies))}"
        return f"{text}, backlog age {now.backlog_age_ms / 1e3:.1f} s, {now.failed} dead, {now.skipped} skipped"


class LiveStats(_Lines):
    """Counts what a streaming job does; thread-safe.

    An image has two latencies: `event-to-publish`, from its event time (for most messages: their publishing) to the publishing
    of its result, and `in-hand-to-result`, from its bytes in memory to the model's result.

    Args:
      samples: How many annotated images the report will show.
    """

    def __init__(self, samples: int = 0):
        self._samples = samples
        self._lock = threading.Lock()
        self._stats = JobStats()
        self._age_ms, self._age_at = 0.0, 0.0

    def add_request(self, request: Request, publish_time: float) -> None:
        """Counts what a message requests; one without images counts as one."""
        images = max(len(request.images) + len(request.dead_letters), 1)
        age_ms = max(0.0, time.time() - publish_time) * 1e3
        with self._lock:
            self._stats.read += images
            self._stats.skipped += request.skipped
            self._age_ms, self._age_at = age_ms, time.monotonic()
        metrics.count_read(images)
        metrics.count_skipped(int(request.skipped))
        metrics.note_backlog_age(age_ms)
        for letter in request.dead_letters:
            metrics.count_results(letter)

    def add_duplicate(self) -> None:
        """Counts an image that was requested before."""
        self.add_unread()
        metrics.count_skipped()

    def add_unread(self) -> None:
        """Counts an image that was not read when the run was stopped; its message comes again."""
        with self._lock:
            self._stats.skipped += 1

    def add_result(self, result: DetectedImage | DeadLetter, now: float) -> None:
        """Counts a result when it is published."""
        if isinstance(result, DeadLetter):
            with self._lock:
                self._stats.add_dead(result)
            return
        latency_ms = max(0.0, now - result.ref.event_time) * 1e3 if result.ref.event_time else result.timing.latency * 1e3
        with self._lock:
            self._stats.add_detected([result], self._samples)
            self._stats.publish_latencies.add([latency_ms / 1e3])
            self._stats.publish_ms.add(now, round(latency_ms))
        metrics.note_latency(latency_ms)

    def stats(self) -> JobStats:
        """A copy of everything counted so far; the age of the backlog is that of the last message, if it came just now."""
        with self._lock:
            copy = self._stats.copy()
            copy.backlog_age_ms = self._age_ms if time.monotonic() - self._age_at < _BACKLOG_SECONDS else 0.0
        return copy

    def line(self, seconds: float) -> str:
        """What happened since the last line, on one line; `seconds` is how long that is."""
        return self._next_line(self.stats(), seconds)


class WorkerStats(_Lines):
    """The statistics of a stream whose workers are in other processes, from their reports.

    Args:
      reports: Reads the reports of workers.
      samples: How many annotated images the report will show.
    """

    def __init__(self, reports: WorkerReports, samples: int = 0):
        self._reports = reports
        self._samples = samples

    def line(self, seconds: float) -> str:
        """What happened since the last line, on one line; `seconds` is how long that is."""
        workers = self._reports.now()
        return self._next_line(self._merged(workers), seconds) if workers else "waiting for workers"

    def now(self) -> JobStats:
        """The statistics of the latest reports."""
        return self._merged(self._reports.now())

    def stats(self) -> JobStats | None:
        """All statistics, once the stream is over; None if no worker has reported.

        Only images with an outcome count as read: messages of the others come again, in the next run.
        """
        workers = self._reports.at_the_end()
        return self._merged(workers) if workers else None

    def _merged(self, workers: list[JobStats]) -> JobStats:
        stats = merge_stats(workers, self._samples)
        stats.read = stats.detected + stats.failed + stats.skipped
        return stats


def _shown(latencies: Times) -> str:
    shown = latencies.percentiles_ms()
    return f"p50 {shown['p50']:.0f} ms p99 {shown['p99']:.0f} ms"
