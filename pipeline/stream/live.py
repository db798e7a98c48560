"""The figures of a streaming job: one line every few seconds, and the `Tally` from which the summary is made at the end.

Kept in the process, since a local job's steps all run in it and the stream has no end at which a runner could hand over a
result. The same figures are Beam metrics (namespace `Streaming`), for runners whose workers are elsewhere.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter

from apache_beam.metrics import Metrics

from pipeline.figures.summary import Tally, percentiles_ms
from pipeline.records import DeadLetter, DetectedImage
from pipeline.stream.messages import Request

_LINE_SECONDS = 10.0
_counters = {name: Metrics.counter("Streaming", name) for name in ("read", "detected", "dead", "skipped")}
_latency_ms = Metrics.distribution("Streaming", "latency_ms")
_backlog_age_ms = Metrics.distribution("Streaming", "backlog_age_ms")
_batch_size = Metrics.distribution("Streaming", "batch_size")

_shared: dict[str, LiveFigures] = {}
_shared_lock = threading.Lock()


def live_figures(job: str, samples: int = 0) -> LiveFigures:
    """The figures of one job of this process; `samples` counts at the first call."""
    with _shared_lock:
        return _shared.setdefault(job, LiveFigures(samples))


class LiveFigures:
    """Counts what a streaming job does; thread-safe.

    Latencies here run from an image's event time (for most messages: their publishing) to the answer being handed to Pub/Sub.

    Args:
      samples: How many annotated images the report will show.
    """

    def __init__(self, samples: int = 0):
        self._samples = samples
        self._lock = threading.Lock()
        self._tally = Tally()
        self._period = _Period()

    def add_request(self, request: Request, publish_time: float) -> None:
        """Counts what a message asks for; one without images counts as one."""
        images = len(request.images) + len(request.dead_letters)
        age_ms = max(0.0, time.time() - publish_time) * 1e3
        with self._lock:
            self._tally.read += max(images, 1)
            self._tally.skipped += request.skipped
            self._period.backlog_age_ms = max(self._period.backlog_age_ms, age_ms)
        _counters["read"].inc(max(images, 1))
        _counters["skipped"].inc(int(request.skipped))
        _backlog_age_ms.update(int(age_ms))

    def add_duplicate(self) -> None:
        """Counts an image that was asked for before."""
        with self._lock:
            self._tally.skipped += 1
        _counters["skipped"].inc()

    def add_result(self, result: DetectedImage | DeadLetter, now: float) -> None:
        """Counts an answer at the time it is handed to Pub/Sub."""
        if isinstance(result, DeadLetter):
            with self._lock:
                self._tally.add_dead(result)
                self._period.dead += 1
            _counters["dead"].inc()
            return
        latency_ms = max(0.0, now - result.ref.event_time) * 1e3 if result.ref.event_time else result.timing.latency * 1e3
        with self._lock:
            self._tally.add_detected(result, self._samples)
            self._period.detected += 1
            self._period.latencies[_bucket(latency_ms)] += 1
            if result.timing.led_batch:
                self._period.batches.append(result.timing.led_batch)
        _counters["detected"].inc()
        _latency_ms.update(int(latency_ms))
        if result.timing.led_batch:
            _batch_size.update(result.timing.led_batch)

    def tally(self) -> Tally:
        """Everything counted so far."""
        with self._lock:
            return self._tally

    def line(self, seconds: float) -> str:
        """What happened since the last line, on one line; `seconds` is how long that is."""
        with self._lock:
            period, self._period = self._period, _Period()
            total, dead, skipped = self._tally.detected, sum(self._tally.dead.values()), self._tally.skipped
        text = f"{total} images, {period.detected / max(seconds, 1e-9):.1f} images/s"
        if period.detected:
            shown = percentiles_ms(period.latencies)
            fill = sum(period.batches) / max(len(period.batches), 1)
            text += f", batches of {fill:.1f}, latency p50 {shown['p50']:.0f} ms p99 {shown['p99']:.0f} ms"
        return f"{text}, backlog age {period.backlog_age_ms / 1e3:.1f} s, {dead} dead, {skipped} skipped"


class _Period:
    """What happened since the last line."""

    def __init__(self) -> None:
        self.detected = 0
        self.dead = 0
        self.backlog_age_ms = 0.0
        self.latencies: Counter[int] = Counter()
        self.batches: list[int] = []


class LiveLines:
    """Prints a line every ten seconds until left; use as a context manager around a run."""

    def __init__(self, figures: LiveFigures):
        self._figures = figures
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._print, name="live", daemon=True)

    def __enter__(self) -> LiveLines:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._left.set()
        self._thread.join()

    def _print(self) -> None:
        started = time.monotonic()
        while not self._left.wait(_LINE_SECONDS):
            line = self._figures.line(_LINE_SECONDS)
            print(f"{time.monotonic() - started:6.0f} s  {line}", file=sys.stderr, flush=True)


def _bucket(milliseconds: float) -> int:
    return math.ceil(math.log(max(milliseconds, 1e-3), 1.1))
