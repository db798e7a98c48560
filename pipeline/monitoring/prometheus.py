"""The Prometheus metrics of a job, rendered from its `JobStats` and its process at each scrape.

`METRICS` has each metric once, with its unit, labels and meaning; docs/operations.md is written from it. Cardinality is bounded:
reasons are those of `pipeline.failures`, versions those in use, parts those of `PARTS`.
"""

from __future__ import annotations

import contextlib
import glob
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pipeline.failures import REASONS
from pipeline.limits import MEMORY
from pipeline.monitoring.health import readiness
from pipeline.monitoring.http_server import Answer, Page
from pipeline.process import PROCESS
from pipeline.stats.counted import COUNTED
from pipeline.stats.histogram import BOUNDS_S, Times
from pipeline.stats.job_stats import STAGES, VERSION_EVENTS, JobStats, summed

_IMAGES = tuple(2.0**n for n in range(11))

Buckets = tuple[list[tuple[str, float]], float]  # of a histogram: values up to each bound, and their sum


class Metric(NamedTuple):
    """One metric.

    Its values are a number, None where it is unknown, or `Buckets` of a histogram; with labels a mapping of their values to it.
    """

    name: str
    kind: str
    unit: str
    help: str
    values: Callable[[JobStats], Any]
    labels: tuple[str, ...] = ()


def _outcomes(stats: JobStats) -> dict[tuple[str, str], int]:
    dead = summed((reason, images) for (_, reason), images in stats.dead.items())
    reasons = sorted({reason for reasons in REASONS.values() for reason in reasons})
    return {
        ("detected", ""): stats.detected,
        ("skipped", ""): stats.skipped,
        **{("dead", reason): dead[reason] for reason in reasons},
    }


def _buckets(bounds: Iterable[float], values: Mapping[float, int], total: float) -> Buckets:
    """Divides values among buckets; `values` has their number by value."""
    found = [(str(bound), float(sum(number for value, number in values.items() if value <= bound))) for bound in bounds]
    return [*found, ("+Inf", float(sum(values.values())))], total


def _seconds(times: Times) -> Buckets:
    values = {BOUNDS_S[bucket]: number for bucket, number in times.counts.items()}
    return _buckets(BOUNDS_S[:-1], values, times.total_s)


def _batches(stats: JobStats) -> Buckets:
    total = sum(size * batches for size, batches in stats.batches.items())
    return _buckets(_IMAGES, {float(size): batches for size, batches in stats.batches.items()}, float(total))


def _threads(_stats: JobStats) -> int:
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()


def _memory(_stats: JobStats) -> int:
    """Bytes in memory of this process and of those that it has started; pages that several share count once."""
    found, left = 0, ["self"]
    while left:
        process = left.pop()
        with contextlib.suppress(OSError):  # it has ended
            for tasks in glob.glob(f"/proc/{process}/task/*/children"):
                with open(tasks) as children:
                    left += children.read().split()
            with open(f"/proc/{process}/smaps_rollup") as rollup:
                found += next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))
    return found


def _memory_limit(_stats: JobStats) -> int:
    return MEMORY.limit_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


METRICS: tuple[Metric, ...] = (
    Metric(
        *("detection_images_total", "counter", "images"),
        "images with an outcome: detected, dead (with the reason of the dead letter) or skipped",
        _outcomes,
        ("outcome", "reason"),
    ),
    Metric("detection_images_read_total", "counter", "images", "images listed or requested", lambda stats: stats.read),
    Metric(
        *("detection_images_in_flight", "gauge", "images", "images read, without an outcome yet"),
        lambda stats: max(0, stats.read - stats.detected - stats.failed - stats.skipped),
    ),
    Metric(
        *("detection_stage_seconds", "histogram", "seconds", "time of an image in a stage; of a batch in `model`"),
        lambda stats: {(stage,): _seconds(stats.stages.get(stage, Times())) for stage in (*STAGES, "model")},
        ("stage",),
    ),
    Metric(
        *("detection_latency_seconds", "histogram", "seconds", "from an image's bytes in memory to its result"),
        lambda stats: _seconds(stats.latencies),
    ),
    Metric(
        *("detection_event_to_publish_seconds", "histogram", "seconds"),
        "streams: from an image's event time to the publishing of its result",
        lambda stats: _seconds(stats.publish_latencies),
    ),
    Metric("detection_batch_images", "histogram", "images", "images of a device batch, with padding", _batches),
    Metric(
        *("detection_batch_images_max", "gauge", "images", "largest allowed batch; 0: unknown yet"),
        lambda stats: max(stats.batch_sizes, default=0),
    ),
    Metric(
        *("detection_backlog_age_seconds", "gauge", "seconds"),
        "streams: age of the last message read; 0 when none came for 20 seconds",
        lambda stats: stats.backlog_age_ms / 1e3,
    ),
    Metric(
        *("detection_undelivered_messages", "gauge", "messages"),
        "streams: messages of the subscription that nobody has received, as Cloud Monitoring counts them; absent where unknown",
        lambda _stats: COUNTED.undelivered,
    ),
    Metric(
        *("detection_model_info", "gauge", "1", "1 for each model version in use"),
        lambda stats: {model: 1} if (model := stats.in_use if stats.in_use[0] else stats.model)[0] else {},
        ("name", "version"),
    ),
    Metric(
        *("detection_model_events_total", "counter", "events"),
        "versions put into use while the job works (swaps), refused ones (refusals); of a canary: its images, the ones that it "
        "failed on, the objects of both versions, the pairs of objects that agree, and its milliseconds",
        lambda stats: {(event,): stats.model_events[event] for event in VERSION_EVENTS},
        ("event",),
    ),
    Metric(
        *("detection_ready", "gauge", "1", "1 if /readyz answers with 200, else 0"),
        lambda stats: int(all(well for _, well, _ in readiness(stats))),
    ),
    Metric(
        *("detection_stalled_seconds", "gauge", "seconds", "time without progress while work waits"),
        lambda _stats: {(name,): part.stalled_s for name, part in PROCESS.parts.items()},
        ("part",),
    ),
    Metric("detection_threads", "gauge", "threads", "threads of the process, TensorFlow's included", _threads),
    Metric(
        *("detection_memory_bytes", "gauge", "bytes", "memory of the process and of its feeder processes, shared memory once"),
        _memory,
    ),
    Metric("detection_memory_limit_bytes", "gauge", "bytes", "memory of the container, else the machine", _memory_limit),
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
            values = metric.values(stats)
            known = values if metric.labels else {} if values is None else {(): values}
            for labels, value in known.items():
                family.add_metric(labels, *(value if isinstance(value, tuple) else (value,)))
            yield family


def page(stats: Callable[[], JobStats]) -> Page:
    """The page with the metrics of a job and of its process in Prometheus' text format."""
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(_Collector(stats))
    ProcessCollector(registry=registry)

    def answer(headers: Mapping[str, str]) -> Answer:
        encode, content_type = choose_encoder(headers.get("Accept", ""))
        return Answer(encode(registry), headers={"Content-Type": content_type})

    return answer
