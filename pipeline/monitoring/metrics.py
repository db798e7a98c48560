"""The Prometheus metrics of a job, rendered from its `JobStats` and its process at each scrape.

`METRICS` has each metric once, with its unit, labels and meaning; docs/operations.md is written from it. Cardinality is bounded:
reasons are those of `pipeline.failures`, versions those in use, parts those of `PARTS`.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.failures import REASONS
from pipeline.limits import MEMORY
from pipeline.monitoring.health import readiness
from pipeline.stats.histogram import BOUNDS_S, Times
from pipeline.stats.process import PROCESS
from pipeline.stats.summary import STAGES, VERSION_EVENTS, JobStats

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

_IMAGES = tuple(2.0**n for n in range(11))

Buckets = tuple[list[tuple[str, float]], float]  # of a histogram: values up to each bound, and their sum
Labelled = Iterable[tuple[tuple[str, ...], Any]]  # values, those of a histogram as `Buckets`, by the values of the labels


class Metric(NamedTuple):
    """One metric.

    Attributes:
      name: Its whole name; that of a counter ends with `_total`.
      kind: Its type in Prometheus: counter, gauge or histogram.
      unit: Of its values.
      labels: The names of its labels.
      help: What it means.
      values: Its values now.
    """

    name: str
    kind: str
    unit: str
    labels: tuple[str, ...]
    help: str
    values: Callable[[JobStats], Labelled]


def _one(value: Callable[[JobStats], Any]) -> Callable[[JobStats], Labelled]:
    return lambda stats: [((), value(stats))]


def _outcomes(stats: JobStats) -> Iterator[tuple[tuple[str, str], int]]:
    yield ("detected", ""), stats.detected
    yield ("skipped", ""), stats.skipped
    dead: Counter[str] = Counter()
    for (_, reason), images in stats.dead.items():
        dead[reason] += images
    for reason in sorted({reason for reasons in REASONS.values() for reason in reasons}):
        yield ("dead", reason), dead[reason]


def _buckets(bounds: Iterable[float], values: Mapping[float, int], total: float) -> Buckets:
    """Divides values among buckets; `values` has their number by value."""
    found = [(str(bound), float(sum(number for value, number in values.items() if value <= bound))) for bound in bounds]
    return [*found, ("+Inf", float(sum(values.values())))], total


def _seconds(times: Times) -> Buckets:
    values = {BOUNDS_S[bucket]: number for bucket, number in times.counts.items()}
    return _buckets(BOUNDS_S[:-1], values, times.total_s)


def _stages(stats: JobStats) -> Iterator[tuple[tuple[str], Buckets]]:
    for stage in (*STAGES, "model"):
        yield (stage,), _seconds(stats.stages.get(stage, Times()))


def _batches(stats: JobStats) -> Buckets:
    total = sum(size * batches for size, batches in stats.batches.items())
    return _buckets(_IMAGES, {float(size): batches for size, batches in stats.batches.items()}, float(total))


def _threads(_stats: JobStats) -> int:
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()


def _memory_limit(_stats: JobStats) -> int:
    return MEMORY.limit_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _in_flight(stats: JobStats) -> int:
    return max(0, stats.read - stats.detected - stats.failed - stats.skipped)


def _ready(stats: JobStats) -> int:
    return int(all(check.passes for check in readiness(stats)))


def _metric(name: str, kind: str, unit: str, meaning: str, value: Callable[[JobStats], Any]) -> Metric:
    """A metric without labels."""
    return Metric(name, kind, unit, (), meaning, _one(value))


METRICS: tuple[Metric, ...] = (
    Metric(
        *("detection_images_total", "counter", "images", ("outcome", "reason")),
        "images with an outcome: detected, dead (with the reason of the dead letter) or skipped",
        _outcomes,
    ),
    _metric("detection_images_read_total", "counter", "images", "images listed or requested", lambda stats: stats.read),
    _metric("detection_images_in_flight", "gauge", "images", "images read, without an outcome yet", _in_flight),
    Metric(
        *("detection_stage_seconds", "histogram", "seconds", ("stage",)),
        "time of an image in a stage; of a batch in `model`",
        _stages,
    ),
    _metric(
        *("detection_latency_seconds", "histogram", "seconds", "from an image's bytes in memory to its result"),
        lambda stats: _seconds(stats.latencies),
    ),
    _metric(
        *("detection_event_to_publish_seconds", "histogram", "seconds"),
        "streams: from an image's event time to the publishing of its result",
        lambda stats: _seconds(stats.publish_latencies),
    ),
    _metric("detection_batch_images", "histogram", "images", "images of a device batch, with padding", _batches),
    _metric(
        *("detection_batch_images_max", "gauge", "images", "largest allowed batch; 0: unknown yet"),
        lambda stats: max(stats.batch_sizes, default=0),
    ),
    _metric(
        *("detection_backlog_age_seconds", "gauge", "seconds"),
        "streams: age of the last message read; 0 when none came for 20 seconds",
        lambda stats: stats.backlog_age_ms / 1e3,
    ),
    Metric(
        *("detection_model_info", "gauge", "1", ("name", "version"), "1 for each model version in use"),
        lambda stats: [(stats.model, 1)] if stats.model[0] else [],
    ),
    Metric(
        *("detection_model_events_total", "counter", "events", ("event",)),
        "versions put into use while the job works (swaps), refused ones (refusals); of a canary: its images, the ones that it "
        "failed on, the objects of both versions, the pairs of objects that agree, and its milliseconds",
        lambda stats: [((event,), stats.model_events[event]) for event in VERSION_EVENTS],
    ),
    _metric("detection_ready", "gauge", "1", "1 if /readyz answers with 200, else 0", _ready),
    Metric(
        *("detection_stalled_seconds", "gauge", "seconds", ("part",), "time without progress while work waits"),
        lambda _stats: [((name,), part.stalled_s) for name, part in PROCESS.parts.items()],
    ),
    _metric("detection_threads", "gauge", "threads", "threads of the process, TensorFlow's included", _threads),
    _metric(
        *("detection_memory_limit_bytes", "gauge", "bytes", "memory of the container, else the machine"),
        _memory_limit,
    ),
)
PROCESS_METRICS = "`process_*`: resident memory, open files, CPU seconds and start time of the process, by `prometheus_client`"


class _Collector:
    """A custom collector of `prometheus_client`: each scrape takes one consistent copy of the statistics."""

    def __init__(self, stats: Callable[[], JobStats]):
        self._stats = stats

    def collect(self) -> Iterator[Any]:
        """The families of `prometheus_client`, one for each metric."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        stats = self._stats()
        for metric in METRICS:
            family = families[metric.kind](metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.values(stats):
                family.add_metric(labels, *(value if isinstance(value, tuple) else (value,)))
            yield family


def registry(stats: Callable[[], JobStats]) -> Any:
    """A registry of `prometheus_client` with the metrics of a job and of its process.

    Args:
      stats: Returns a consistent copy of the job's statistics; has no side effects.
    """
    from prometheus_client import CollectorRegistry, ProcessCollector

    collectors = CollectorRegistry()
    collectors.register(_Collector(stats))
    ProcessCollector(registry=collectors)
    return collectors


def application(stats: Callable[[], JobStats]) -> WSGIApplication:
    """The WSGI application that serves the metrics in Prometheus' text format."""
    from prometheus_client import make_wsgi_app

    app: WSGIApplication = make_wsgi_app(registry(stats))
    return app
