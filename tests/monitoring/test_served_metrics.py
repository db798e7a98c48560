"""A streaming job under load, scraped by a real Prometheus: metrics, alerts and dashboard have data, health follows an outage."""

import contextlib
import json
import re
import signal
import time
import urllib.error
import urllib.request

import pytest

from pipeline.monitoring.prometheus import METRICS
from tests.deploy.test_alerts import QUERIES, RULES
from tests.detect.versioned_models import save_version
from tests.forked_jobs import ForkedJob
from tests.launch.jobs import write_work
from tests.monitoring.prometheus import needs_prometheus, port_of, running_prometheus, samples_of
from tests.processes import wait_until
from tests.streaming_job import CuttableProxy, InlineImages, StreamingJob

_COMPARED = re.compile(r" (==|>|<) [\d.]+( or absent\(.*\))?$")  # what makes an alert of an expression
NAMES = {"$job": "detection", "$__rate_interval": "30s"}
DASHBOARD = [
    _COMPARED.sub("", re.sub("|".join(map(re.escape, NAMES)), lambda found: NAMES[found[0]], query)) for query in QUERIES
]
OF_BATCH = {"detection_last_success_timestamp_seconds"}  # a file of a batch job has it


def looked_at(alert: str) -> list[str]:
    """What an alert compares, as queries; of one that combines several comparisons the metrics."""
    compared = _COMPARED.sub("", alert.split(" and max", maxsplit=1)[0].strip())
    if not re.search(r" (and|or|==|>|<) ", compared):
        return [compared]
    return sorted({*re.findall(r"\b(?:detection|process)_\w+", compared)} - OF_BATCH)


ALERTS = [query for rule in RULES for query in looked_at(rule["expr"])]
FLAGS = ("--metrics-port", 0, "--metrics-host", "127.0.0.1")


def port_when_served(job: StreamingJob) -> int:
    return wait_until(lambda: port_of(job.output()), job.output)


def asked(port: int, path: str) -> tuple[int, str]:
    """Status and text of a path."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as err:
        return err.code, err.read().decode()


@pytest.mark.matrix
@needs_prometheus
def test_a_real_prometheus_has_data_for_every_metric_of_a_stream_under_load(pubsub_emulator, tmp_path, bright_model, bright_png):
    flags = (*FLAGS, "--allow-uri-prefix", tmp_path)
    with StreamingJob(pubsub_emulator, tmp_path, bright_model, *flags) as job, contextlib.ExitStack() as stack:
        prometheus = stack.enter_context(running_prometheus(tmp_path, port_when_served(job)))
        images, number = InlineImages(job, bright_png), 0
        job.publish(json.dumps({"uri": str(tmp_path / "gone.png")}).encode())
        while not prometheus.query("increase(detection_images_total{outcome='detected'}[5s]) > 0"):
            images.publish(range(number, number + 20))
            number += 20
            wait_until(lambda n=number: images.answered(n), job.output)
        for metric in (each for each in METRICS if each.name != "detection_undelivered_messages"):  # of Cloud Monitoring
            name = f"{metric.name}_bucket" if metric.kind == "histogram" else metric.name
            found = wait_until(lambda name=name: prometheus.query(name), job.output)
            assert set(metric.labels) <= {label for series in found for label in series["metric"]}, metric.name
        for name in ("process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"):
            assert prometheus.query(f"{name} > 0"), name
        dead = "detection_images_total{outcome='dead', reason='not_found'} == 1"
        wait_until(lambda: prometheus.query(dead), job.output)
        p99 = "histogram_quantile(0.99, sum by (le) (detection_event_to_publish_seconds_bucket)) > 0"
        assert prometheus.query(p99)
        assert prometheus.query("detection_ready == 1")
        for query in DASHBOARD + ALERTS:
            wait_until(lambda query=query: prometheus.query(query), lambda query=query: query)
        assert prometheus.query("detection_model_info{name='bright', version='3'} == 1")
        assert asked(port_when_served(job), "/livez")[0] == asked(port_when_served(job), "/readyz")[0] == 200
        assert job.signal(signal.SIGTERM) == 0, job.output()


@pytest.mark.matrix
def test_readiness_follows_an_outage_of_pubsub_and_liveness_does_not(pubsub_emulator, tmp_path, bright_model, bright_png):
    """An idle stream and one without Pub/Sub are not stuck, however short the time of the watchdog."""
    proxy = CuttableProxy(pubsub_emulator.host)
    flags = (*FLAGS, "--stuck-after-s", 8)
    with StreamingJob(pubsub_emulator, tmp_path, bright_model, *flags, host=proxy.host) as job:
        port = port_when_served(job)
        wait_until(lambda: asked(port, "/readyz")[0] == 200, job.output)
        proxy.cut()
        wait_until(lambda: "FAILED Pub/Sub" in asked(port, "/readyz")[1], job.output)
        over = time.monotonic() + 10.0  # more than the time of the watchdog
        wait_until(lambda: time.monotonic() > over or "the job is stuck" in job.output())
        assert "the job is stuck" not in job.output()
        assert asked(port, "/readyz")[0] == 503
        assert asked(port, "/livez")[0] == 200
        assert "lost Pub/Sub" in job.output()
        images = InlineImages(job, bright_png)
        images.publish(range(3))
        proxy.recover()
        wait_until(lambda: asked(port, "/readyz")[0] == 200, job.output)
        wait_until(lambda: images.answered(3), job.output)
        assert job.signal(signal.SIGTERM) == 0, job.output()
    assert "the job is stuck" not in job.output()


def test_a_batch_job_serves_its_metrics_while_it_works(tmp_path):
    """The port is free again when it has ended. The model takes its time, so that there are seconds to look."""
    images, log = 200, tmp_path / "log"
    write_work(tmp_path / "in", images, image_wh=(64, 48))
    save_version(tmp_path / "model", 7, call_ms=50)
    arguments = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--model", tmp_path / "model"]
    with ForkedJob([*arguments, "--batch-sizes", 1, "--concurrent-batches", 1, *FLAGS], log) as job:
        port = wait_until(lambda: log.exists() and port_of(log.read_text()), log.read_text, job)
        seen = wait_until(lambda: samples_of(port)["detection_images_total", "detected", ""], log.read_text, job)
        assert 0 < seen < images
        assert job.wait() == 0, log.read_text()
    with pytest.raises(OSError):
        samples_of(port)
