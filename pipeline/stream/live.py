"""The figures of a streaming job: the `JobStats` from which the summary is made at the end, and what a line of the display says.

Kept in the process, since a stream has no end at which a runner could hand over a result; workers that are elsewhere tell
theirs to the launcher. Everything here is bounded: a stream runs for months. The same figures are Beam metrics
(`pipeline.stats.metrics`).
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections import Counter
from typing import NamedTuple

from pipeline.records import DeadLetter, DetectedImage
from pipeline.stats import metrics
from pipeline.stats.histogram import Latencies, latency_bucket, percentiles_ms
from pipeline.stats.summary import JobStats, merge_stats
from pipeline.stats.worker_reports import WorkerReports
from pipeline.stream.messages import Request


@dataclasses.dataclass
class _Period:
    """What happened since the last line.

    Attributes:
      detected: Images.
      batches: Device batches.
      batch_images: Their rungs, summed.
      event_to_publish: Images by `latency_bucket`, from event time to publishing.
      in_hand_to_result: The same, from being in hand to the result, which is what summary and report of a batch job have.
      backlog_age_ms: Of the oldest message that was read.
    """

    detected: int = 0
    batches: int = 0
    batch_images: int = 0
    event_to_publish: Latencies = dataclasses.field(default_factory=Counter)
    in_hand_to_result: Latencies = dataclasses.field(default_factory=Counter)
    backlog_age_ms: float = 0.0

    def merge(self, other: _Period) -> None:
        """Adds what happened elsewhere in the same time."""
        self.detected += other.detected
        self.batches += other.batches
        self.batch_images += other.batch_images
        self.event_to_publish.update(other.event_to_publish)
        self.in_hand_to_result.update(other.in_hand_to_result)
        self.backlog_age_ms = max(self.backlog_age_ms, other.backlog_age_ms)

    def since(self, before: _Period) -> _Period:
        """What happened after an earlier moment, where both began at the same time."""
        return _Period(
            self.detected - before.detected,
            self.batches - before.batches,
            self.batch_images - before.batch_images,
            self.event_to_publish - before.event_to_publish,
            self.in_hand_to_result - before.in_hand_to_result,
            self.backlog_age_ms,
        )


class OfProcess(NamedTuple):
    """What a worker elsewhere tells: all that it has counted."""

    stats: JobStats
    since_it_began: _Period


class LiveStats:
    """Counts what a streaming job does; thread-safe.

    An image has two latencies: `event-to-publish`, from its event time (for most messages: their publishing) to the answer being
    handed to Pub/Sub, and `in-hand-to-result`, from its bytes being in hand to the model's result.

    Args:
      samples: How many annotated images the report will show.
    """

    def __init__(self, samples: int = 0):
        self._samples = samples
        self._lock = threading.Lock()
        self._tally = JobStats()
        self._period = _Period()

    def add_request(self, request: Request, publish_time: float) -> None:
        """Counts what a message asks for; one without images counts as one."""
        images = max(len(request.images) + len(request.dead_letters), 1)
        age_ms = max(0.0, time.time() - publish_time) * 1e3
        with self._lock:
            self._tally.read += images
            self._tally.skipped += request.skipped
            self._period.backlog_age_ms = max(self._period.backlog_age_ms, age_ms)
        metrics.count_read(images)
        metrics.count_skipped(int(request.skipped))
        metrics.note_backlog_age(age_ms)
        for letter in request.dead_letters:
            metrics.count_result(letter)

    def add_duplicate(self) -> None:
        """Counts an image that was asked for before."""
        with self._lock:
            self._tally.skipped += 1
        metrics.count_skipped()

    def add_given_back(self) -> None:
        """Counts an image that was not read when the run was stopped; its message comes again."""
        with self._lock:
            self._tally.skipped += 1

    def add_result(self, result: DetectedImage | DeadLetter, now: float) -> None:
        """Counts an answer at the time it is handed to Pub/Sub."""
        if isinstance(result, DeadLetter):
            with self._lock:
                self._tally.add_dead(result)
            return
        latency_ms = max(0.0, now - result.ref.event_time) * 1e3 if result.ref.event_time else result.timing.latency * 1e3
        with self._lock:
            self._tally.add_detected(result, self._samples)
            self._period.detected += 1
            self._tally.publish_latencies[latency_bucket(latency_ms)] += 1
            self._period.event_to_publish[latency_bucket(latency_ms)] += 1
            self._period.in_hand_to_result[latency_bucket(result.timing.latency * 1e3)] += 1
            if result.timing.led_batch:
                self._period.batches += 1
                self._period.batch_images += result.timing.led_batch
        metrics.note_latency(latency_ms)

    def stats(self) -> JobStats:
        """Everything counted so far."""
        with self._lock:
            return self._tally

    def line(self, seconds: float) -> str:
        """What happened since the last line, on one line; `seconds` is how long that is."""
        with self._lock:
            period, self._period = self._period, _Period()
            return _line(self._tally, period, seconds)

    def told(self) -> OfProcess:
        """What a worker elsewhere tells; there, nobody asks for lines."""
        with self._lock:
            since_it_began = copy.deepcopy(self._period)
            self._period.backlog_age_ms = 0.0
            return OfProcess(copy.deepcopy(self._tally), since_it_began)


class WorkerFigures:
    """The figures of a stream whose workers are elsewhere, by what these tell.

    Args:
      told: What they tell.
      samples: How many annotated images the report will show.
    """

    def __init__(self, told: WorkerReports, samples: int = 0):
        self._told = told
        self._samples = samples
        self._before = _period_of(told.now())  # nothing, but for a launcher that comes back to a stream

    def line(self, seconds: float) -> str:
        """What happened since the last line, on one line; `seconds` is how long that is."""
        workers = self._told.now()
        if not workers:
            return "waiting for workers"
        now = _period_of(workers)
        period, self._before = now.since(self._before), now
        return _line(self._merged(workers), period, seconds)

    def stats(self) -> JobStats | None:
        """Everything that was counted, once the stream is over; None where no worker has told anything.

        Only what has an outcome counts as read: what was in hand comes again, to the next run.
        """
        workers = self._told.at_the_end()
        return self._merged(workers) if workers else None

    def _merged(self, workers: list[OfProcess]) -> JobStats:
        stats = merge_stats((each.stats for each in workers), self._samples)
        stats.read = stats.detected + sum(stats.dead.values()) + stats.skipped
        return stats


def _period_of(workers: list[OfProcess]) -> _Period:
    period = _Period()
    for each in workers:
        period.merge(each.since_it_began)
    return period


def _line(stats: JobStats, period: _Period, seconds: float) -> str:
    text = f"{stats.detected} images, {period.detected / max(seconds, 1e-9):.1f} images/s"
    if period.detected:
        text += f", batches of {period.batch_images / max(period.batches, 1):.1f}"
        text += f", event-to-publish {_shown(period.event_to_publish)}, in-hand-to-result {_shown(period.in_hand_to_result)}"
    dead = sum(stats.dead.values())
    return f"{text}, backlog age {period.backlog_age_ms / 1e3:.1f} s, {dead} dead, {stats.skipped} skipped"


def _shown(latencies: Counter[int]) -> str:
    shown = percentiles_ms(latencies)
    return f"p50 {shown['p50']:.0f} ms p99 {shown['p99']:.0f} ms"
