"""The Beam metrics of a job; the same calls count to the `JobStats` of this process, if a display or a launcher reads these.

docs/operations.md lists them. Distributions hold whole numbers, hence microseconds.

Beam keeps metrics by bundle and thread. So a DoFn calls these functions where it processes an element, never from the thread of a
pool: there the counts would reach `JobStats` only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from apache_beam.metrics import Metrics

from pipeline.records import DeadLetter, DetectedImage
from pipeline.stats.counted import COUNTED
from pipeline.stats.job_stats import STAGES, VERSION_EVENTS

NAMESPACE = "Detection"

_log = logging.getLogger(__name__)
_counters = {name: Metrics.counter(NAMESPACE, name) for name in ("read", "skipped", "detected", "dead", *VERSION_EVENTS)}
_distributions = {
    name: Metrics.distribution(NAMESPACE, name)
    for name in ("batch_size", "model_us", *(f"{stage}_us" for stage in STAGES), "latency_ms", "backlog_age_ms")
}


def count_read(images: int = 1) -> None:
    """Counts images that were listed or requested, whatever their outcome."""
    _counters["read"].inc(images)
    with COUNTED.lock:
        for stats in COUNTED.stats:
            stats.read += images


def count_skipped(images: int = 1) -> None:
    """Counts images that were read before."""
    _counters["skipped"].inc(images)
    with COUNTED.lock:
        for stats in COUNTED.stats:
            stats.skipped += images


def count_results(*results: DetectedImage | DeadLetter) -> None:
    """Counts the outcomes of images, where they become elements of the pipeline."""
    detected = [result for result in results if isinstance(result, DetectedImage)]
    dead = [result for result in results if isinstance(result, DeadLetter) and not result.skipped]
    if skipped := len(results) - len(detected) - len(dead):
        count_skipped(skipped)
    for letter in dead:
        where = {"image": letter.ref.uri, "request": letter.ref.request_id, "reason": letter.reason}
        _log.info("dead letter: %s", letter.message, extra=where)
    for name, amount in (("dead", len(dead)), ("detected", len(detected))):
        if amount:
            _counters[name].inc(amount)
    for timing in (image.timing for image in detected):
        for stage in STAGES:
            _distributions[f"{stage}_us"].update(int(getattr(timing, stage) * 1e6))
        for size, seconds in timing.batches:
            _distributions["batch_size"].update(size)
            _distributions["model_us"].update(int(seconds * 1e6))
    with COUNTED.lock:
        for stats in COUNTED.stats:
            stats.add_detected(detected, COUNTED.samples)
            for letter in dead:
                stats.add_dead(letter)


def count_swaps(counts: Mapping[str, int]) -> None:
    """Counts what happened to model versions as Beam metrics: `swaps`, `refusals`, and the counts of a canary."""
    for name, times in counts.items():
        _counters[name].inc(times)


def note_published(image: DetectedImage, now: float) -> None:
    """Notes the latency of a stream's image from its event time, or without one from its bytes in memory, to its publishing."""
    latency_s = max(0.0, now - image.ref.event_time) if image.ref.event_time else image.timing.latency
    _distributions["latency_ms"].update(int(latency_s * 1e3))
    with COUNTED.lock:
        for stats in COUNTED.stats:
            stats.publish_latencies.add([latency_s])
            stats.publish_ms.add(now, round(latency_s * 1e3))


def note_message(published_at: float) -> None:
    """Notes how long a message of a stream, published so many seconds after the epoch, had waited when it was read."""
    age_ms = max(0.0, time.time() - published_at) * 1e3
    _distributions["backlog_age_ms"].update(int(age_ms))
    with COUNTED.lock:
        COUNTED.message_at = time.monotonic()
        for stats in COUNTED.stats:
            stats.backlog_age_ms = age_ms
