"""A collector gets what Prometheus scrapes."""

import http.server
import sys
import threading
import traceback
from typing import ClassVar

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from pipeline.errors import ConfigError
from pipeline.monitoring import metrics, otlp
from tests.monitoring.test_metrics import samples, some_stats
from tests.processes import wait_until


class _Collector(http.server.BaseHTTPRequestHandler):
    requests: ClassVar[list[tuple[str, ExportMetricsServiceRequest]]] = []

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.requests.append((self.path, ExportMetricsServiceRequest.FromString(content)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector():
    _Collector.requests.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def exported(request: ExportMetricsServiceRequest) -> dict:
    ((scope,),) = [resource.scope_metrics for resource in request.resource_metrics]
    return {metric.name: metric for metric in scope.metrics}


def _stacks() -> str:
    return "\n".join("".join(traceback.format_stack(frame)) for frame in sys._current_frames().values())


def test_a_collector_gets_every_metric_again_and_again_and_at_the_end(collector):
    registry = metrics.registry(some_stats)
    with otlp.sent(collector, registry, every_s=0.05):
        wait_until(lambda: len(_Collector.requests) >= 2)
    assert {path for path, _ in _Collector.requests} == {"/v1/metrics"}
    found = exported(_Collector.requests[-1][1])
    assert set(found) == {family.name for family in registry.collect()}

    shown = samples(some_stats())
    (batches,) = found["detection_batch_images"].histogram.data_points
    assert (batches.count, batches.sum) == (shown["detection_batch_images_count",], shown["detection_batch_images_sum",])
    assert list(batches.explicit_bounds) == [2.0**n for n in range(11)]
    assert list(batches.bucket_counts) == [0, 0, 0, 1, *[0] * 8]
    outcomes = found["detection_images"].sum
    assert outcomes.is_monotonic
    dead = {
        tuple(label.value.string_value for label in point.attributes): point.as_double or point.as_int
        for point in outcomes.data_points
    }
    assert dead["dead", "not_allowed"] == 2
    assert found["detection_batch_images_max"].gauge.data_points[0].as_int == 8


def test_a_path_of_the_endpoint_is_kept(collector):
    with otlp.sent(f"{collector}/tenant/v1/metrics", metrics.registry(some_stats), every_s=60.0):
        pass
    assert [path for path, _ in _Collector.requests] == ["/tenant/v1/metrics"]


def test_a_collector_that_is_gone_is_told_once_and_does_not_disturb_the_job(caplog):
    caplog.set_level("WARNING", "pipeline")
    with otlp.sent("http://127.0.0.1:9", metrics.registry(some_stats), every_s=0.01):
        wait_until(lambda: "metrics cannot be sent to http://127.0.0.1:9/v1/metrics" in caplog.text, _stacks)
    assert caplog.text.count("cannot be sent") == 1


def test_metrics_that_cannot_be_collected_are_told_once_too(caplog, collector):
    def broken() -> None:
        raise OSError("no /proc")

    caplog.set_level("WARNING", "pipeline")
    with otlp.sent(collector, metrics.registry(broken), every_s=0.01):
        wait_until(lambda: "metrics cannot be sent to" in caplog.text)
    assert caplog.text.count("cannot be sent") == 1 and not _Collector.requests


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    with pytest.raises(ConfigError, match=r"hybrid-detection-pipeline\[otlp\]"), otlp.sent("http://h", None):
        pass
