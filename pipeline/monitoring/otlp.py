"""Sends a job's metrics to an OpenTelemetry collector: the families of the Prometheus registry, by OTLP over HTTP."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from pipeline.errors import ConfigError
from pipeline.stats.renewal import renewed

_EVERY_SECONDS = 15.0
_TIMEOUT_SECONDS = 5.0
_SCOPE = "detect-objects"
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def sent(endpoint: str, collectors: Any, every_s: float = _EVERY_SECONDS) -> Iterator[None]:
    """Sends the metrics of a registry every few seconds while the block lasts, and at its end.

    Args:
      endpoint: URL of a collector, such as `http://localhost:4318`; its path is that of metrics if it has none.
      collectors: A registry of `prometheus_client`.
      every_s: Seconds between two exports. One that fails is left out: the next has all counts.

    Raises:
      ConfigError: The extra `otlp` is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    except ImportError as err:
        raise ConfigError("otlp_endpoint: expected the extra `otlp`; pip install 'hybrid-detection-pipeline[otlp]'") from err
    url = endpoint if endpoint.rstrip("/").count("/") > len("//") else f"{endpoint.rstrip('/')}/v1/metrics"
    exporter, started_ns = OTLPMetricExporter(url, timeout=_TIMEOUT_SECONDS), time.time_ns()

    failing = False

    def send() -> bool:
        nonlocal failing
        before, failing = failing, True
        try:
            failing = exporter.export(metrics_data(collectors, started_ns, time.time_ns())).name != "SUCCESS"
        finally:
            if failing and not before:
                _log.warning("metrics cannot be sent to %s; trying again every %g s", url, every_s)
        return True

    try:
        with renewed("otlp", every_s, send):
            yield
        with contextlib.suppress(Exception):
            send()
    finally:
        exporter.shutdown()


def metrics_data(collectors: Any, started_ns: int, now_ns: int) -> Any:
    """The `MetricsData` of a registry of `prometheus_client`; counts are cumulative since `started_ns`."""
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    metrics = [_metric(family, started_ns, now_ns) for family in collectors.collect()]
    scope = ScopeMetrics(InstrumentationScope(_SCOPE), metrics, "")
    return MetricsData([ResourceMetrics(Resource.create({"service.name": _SCOPE}), [scope], "")])


def _metric(family: Any, started_ns: int, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Histogram, Metric, NumberDataPoint, Sum

    cumulative, times = AggregationTemporality.CUMULATIVE, (started_ns, now_ns)
    if family.type == "histogram":
        return Metric(family.name, family.documentation, "", Histogram(list(_histogram_points(family, *times)), cumulative))
    points = [NumberDataPoint(sample.labels, *times, sample.value) for sample in family.samples]
    counts = family.type == "counter"
    return Metric(family.name, family.documentation, "", Sum(points, cumulative, True) if counts else Gauge(points))


def _histogram_points(family: Any, started_ns: int, now_ns: int) -> Iterator[Any]:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    buckets: defaultdict[tuple[tuple[str, str], ...], dict[str, float]] = defaultdict(dict)
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = tuple((key, value) for key, value in sample.labels.items() if key != "le")
        if sample.name.endswith("_bucket"):
            buckets[labels][sample.labels["le"]] = sample.value
        elif sample.name.endswith("_sum"):
            sums[labels] = sample.value
    for labels, cumulative in buckets.items():
        counts = [int(high - low) for low, high in itertools.pairwise((0.0, *cumulative.values()))]
        bounds = [float(bound) for bound in cumulative][:-1]
        yield HistogramDataPoint(dict(labels), started_ns, now_ns, sum(counts), sums[labels], counts, bounds, 0.0, 0.0)
