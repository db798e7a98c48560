"""The Prometheus metrics of a job: a custom collector, which views its `JobStats` and its process at each scrape.

`METRICS` has each metric once, with its unit, labels and meaning; docs/operations.md is written from it. Cardinality is bounded:
reasons are those of `pipeline.failures`, versions those in use, parts those of `PARTS`.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pipeline.failures import REASONS
from pipeline.limits import MEMORY, available_cpus
from pipeline.monitoring.health import readiness
from pipeline.stats.histogram import bucket_bounds_ms
from pipeline.stats.process import PROCESS
from pipeline.stats.summary import STAGES, JobStats

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_IMAGES = tuple(2.0**n for n in range(11))


@dataclasses.dataclass(frozen=True)
class Distribution:
    """The values of a histogram.

    Attributes:
      bounds: Upper bounds of the buckets, ascending, without the infinite one.
      counts: Values in each bucket, and beyond the last.
      total: Sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    def cumulative(self) -> list[tuple[str, float]]:
        """The buckets as Prometheus writes them."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, itertools.accumulate(map(float, self.counts)), strict=True))


Labelled = Iterable[tuple[tuple[str, ...], Any]]


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
      name: Its whole name; that of a counter ends with `_total`.
      kind: Its type in Prometheus.
      unit: Of its values.
      labels: The names of its labels.
      help: What it means.
      values: Its values now, by the values of the labels; those of a histogram are `Distribution`s.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
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


def _distribution(bounds: tuple[float, ...], counts: Mapping[float, int], total: float) -> Distribution:
    """Divides values among buckets; `counts` has the values by their upper bound."""
    left = sorted(counts.items())
    found = [sum(number for value, number in left if low < value <= high) for low, high in itertools.pairwise((0.0, *bounds))]
    return Distribution(bounds, (*found, sum(number for value, number in left if value > bounds[-1])), total)


def _seconds(latencies: Mapping[int, int], total: float | None = None) -> Distribution:
    """A histogram in seconds of one in `latency_bucket`s, whose sum without `total` is exact to 5 %."""
    ends = {number: bucket_bounds_ms(number) for number in latencies}
    about = sum(sum(ends[number]) / 2e3 * images for number, images in latencies.items())
    counts = {ends[number][1] / 1e3: images for number, images in latencies.items()}
    return _distribution(_SECONDS, counts, about if total is None else total)


def _stages(stats: JobStats) -> Iterator[tuple[tuple[str], Distribution]]:
    for stage in (*STAGES, "model"):
        latencies = {number: images for (of, number), images in stats.stage_latencies.items() if of == stage}
        yield (stage,), _seconds(latencies, stats.stage_seconds.get(stage, 0.0))


def _batches(stats: JobStats) -> Distribution:
    total = sum(size * batches for size, batches in stats.batches.items())
    return _distribution(_IMAGES, {float(size): batches for size, batches in stats.batches.items()}, float(total))


def _models(stats: JobStats) -> Labelled:
    """The version of the last result."""
    return [(stats.model, 1)] if stats.model[0] else []


def _event(name: str, scale: float = 1.0) -> Callable[[JobStats], Labelled]:
    return _one(lambda stats: stats.model_events[name] * scale)


def _threads(_stats: JobStats) -> int:
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()


def _devices(_stats: JobStats) -> Labelled:
    yield ("cpu",), available_cpus()
    tensorflow = sys.modules.get("tensorflow") if PROCESS.model else None  # by then it is imported
    yield ("gpu",), len(tensorflow.config.get_visible_devices("GPU")) if tensorflow else 0


def _memory_limit(_stats: JobStats) -> int:
    return MEMORY.limit_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


METRICS: tuple[Metric, ...] = (
    Metric(
        *("detection_images_total", "counter", "images", ("outcome", "reason")),
        "images with an outcome: detected, dead (with the reason of the dead letter) or skipped",
        _outcomes,
    ),
    Metric("detection_images_read_total", "counter", "images", (), "images listed or requested", _one(lambda stats: stats.read)),
    Metric(
        *("detection_images_in_hand", "gauge", "images", ()),
        "images read, without an outcome yet",
        _one(lambda stats: max(0, stats.read - stats.detected - stats.failed - stats.skipped)),
    ),
    Metric(
        "detection_stage_seconds",
        "histogram",
        "seconds",
        ("stage",),
        "time of an image in a stage; of a batch in `model`",
        _stages,
    ),
    Metric(
        *("detection_latency_seconds", "histogram", "seconds", ()),
        "from an image's bytes in memory to its result",
        _one(lambda stats: _seconds(stats.latencies)),
    ),
    Metric(
        *("detection_event_to_publish_seconds", "histogram", "seconds", ()),
        "streams: from an image's event time to the publishing of its result",
        _one(lambda stats: _seconds(stats.publish_latencies)),
    ),
    Metric("detection_batch_images", "histogram", "images", (), "images of a device batch, with padding", _one(_batches)),
    Metric(
        *("detection_batch_images_max", "gauge", "images", ()),
        "largest allowed batch; 0: unknown yet",
        _one(lambda stats: max(stats.batch_sizes, default=0)),
    ),
    Metric(
        *("detection_backlog_age_seconds", "gauge", "seconds", ()),
        "streams: age of the oldest message read in the last two intervals of progress lines",
        _one(lambda stats: stats.backlog_age_ms / 1e3),
    ),
    Metric("detection_model_info", "gauge", "1", ("name", "version"), "1 for each model version in use", _models),
    Metric(
        *("detection_model_events_total", "counter", "versions", ("event",)),
        "model versions put into use while the job works (swaps), and refused ones (refusals)",
        lambda stats: [((event,), stats.model_events[event]) for event in ("swaps", "refusals")],
    ),
    Metric("detection_canary_images_total", "counter", "images", (), "images that a canary received", _event("canary_images")),
    Metric("detection_canary_failed_total", "counter", "images", (), "of these, the failed ones", _event("canary_failed")),
    Metric("detection_canary_objects_total", "counter", "objects", (), "objects of both versions", _event("canary_objects")),
    Metric("detection_canary_matched_total", "counter", "pairs", (), "pairs of objects that agree", _event("canary_matched")),
    Metric(
        "detection_canary_seconds_total", "counter", "seconds", (), "time of a canary, over images", _event("canary_ms", 1e-3)
    ),
    Metric(
        *("detection_ready", "gauge", "1", ()),
        "1 if /readyz answers with 200, else 0",
        _one(lambda stats: int(all(check.passes for check in readiness(stats)))),
    ),
    Metric(
        *("detection_stalled_seconds", "gauge", "seconds", ("part",)),
        "time without progress while work waits",
        lambda _stats: [((name,), part.stalled_s) for name, part in PROCESS.parts.items()],
    ),
    Metric("detection_threads", "gauge", "threads", (), "threads of the process, TensorFlow's included", _one(_threads)),
    Metric("detection_devices", "gauge", "devices", ("kind",), "usable CPU cores (cpu) and GPUs (gpu)", _devices),
    Metric(
        "detection_memory_limit_bytes", "gauge", "bytes", (), "memory of the container, else the machine", _one(_memory_limit)
    ),
)
PROCESS_METRICS = "`process_*`: resident memory, open files, CPU seconds and start time of the process, by `prometheus_client`"


class Collector:
    """A custom collector of `prometheus_client`: each scrape takes one copy of the statistics.

    Args:
      stats: Returns a consistent copy of the job's statistics; has no side effects.
      metrics: What to show of them.
    """

    def __init__(self, stats: Callable[[], JobStats], metrics: Iterable[Metric] = METRICS):
        self._stats = stats
        self._metrics = tuple(metrics)

    def collect(self) -> Iterator[Any]:
        """The families of `prometheus_client`, one for each metric."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        stats = self._stats()
        for metric in self._metrics:
            family = families[metric.kind](metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.values(stats):
                if isinstance(value, Distribution):
                    family.add_metric(labels, value.cumulative(), value.total)
                else:
                    family.add_metric(labels, value)
            yield family


def registry(stats: Callable[[], JobStats], metrics: Iterable[Metric] = METRICS) -> Any:
    """A registry of `prometheus_client` with the metrics of a job and of its process."""
    from prometheus_client import CollectorRegistry, ProcessCollector

    collectors = CollectorRegistry()
    collectors.register(Collector(stats, metrics))
    ProcessCollector(registry=collectors)
    return collectors


def application(collectors: Any) -> WSGIApplication:
    """The WSGI application that serves a registry's metrics in Prometheus' text format."""
    from prometheus_client import make_wsgi_app

    app: WSGIApplication = make_wsgi_app(collectors)
    return app
