"""The lines of a streaming job, and the stats behind its summary."""

import math
import re

import numpy as np

from pipeline.records import DeadLetter, DetectedImage, Detections, ImageRef, Timing
from pipeline.report.page import render_report
from pipeline.results.run import Run
from pipeline.stats.job_stats import JobStats
from pipeline.stats.summary import RunFacts, summarise
from pipeline.stats.worker_reports import StatsReporter, WorkerReports
from pipeline.stream import live
from pipeline.stream.live import LiveStats, WorkerStats
from pipeline.stream.messages import Request


def detected(n, latency_s, led_batch=0, now=1000.0):
    found = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.int32), np.zeros(0, np.float32), ())
    ref = ImageRef(f"gs://b/{n}", event_time=now - latency_s)
    return DetectedImage(ref, 4, 3, "m", "1", found, Timing(led_batch=led_batch, finished_at=now, latency=latency_s / 5))


def figures_of_a_minute():
    figures = LiveStats()
    figures.add_request(Request("m1", images=tuple(ImageRef(f"gs://b/{n}") for n in range(100))), publish_time=0.0)
    figures.add_request(Request("m2", skipped=True), publish_time=0.0)
    figures.add_request(Request("m3", dead_letters=(DeadLetter(ImageRef(""), "message", "bad_json", "x"),)), publish_time=0.0)
    for n in range(98):
        figures.add_result(detected(n, 0.1 if n < 97 else 10.0, led_batch=8 if n % 8 == 0 else 0), now=1000.0)
    figures.add_result(DeadLetter(ImageRef(""), "message", "bad_json", "x"), now=1000.0)
    figures.add_result(DeadLetter(ImageRef("gs://b/98"), "read", "not_found", "x"), now=1000.0)
    figures.add_duplicate()
    return figures


def test_a_line_shows_rate_batch_fill_latency_and_failures_since_the_last_one():
    figures = figures_of_a_minute()
    stats, line = figures.stats(), figures.line(seconds=10.0)
    assert (stats.read, stats.detected, stats.failed, stats.skipped) == (102, 98, 2, 2)
    assert line.startswith("98 images, 9.8 images/s, batches of 8.0, event-to-publish p50 ")
    shown = re.search(r"event-to-publish p50 (\d+) ms p99 (\d+) ms, in-hand-to-result p50 (\d+) ms p99 (\d+) ms", line)
    for value, (low, high) in zip(map(float, shown.groups()), ((50, 250), (5000, 10_001), (10, 50), (1000, 2500)), strict=True):
        assert low <= value <= high
    assert line.endswith(", 2 dead, 2 skipped")
    assert re.fullmatch(r"98 images, 0.0 images/s, backlog age \d+.\d s, 2 dead, 2 skipped", figures.line(seconds=10.0))


def test_the_summary_has_both_latencies_under_their_own_names():
    facts = RunFacts(0.0, 0.0, 60.0, "", {}, "streaming", "m")
    summary = summarise(figures_of_a_minute().stats(), facts)
    shown = [*summary["event_to_publish_ms"].items(), *summary["latency_ms"].items()]
    assert [name for name, _ in shown] == 2 * ["p50", "p90", "p99", "max"]
    assert (summary["event_to_publish_ms"]["max"], summary["latency_ms"]["max"]) == (10_000, 2000)
    assert {*summary["over_time"]} == {"event_to_publish_ms"}
    page = render_report(summary, [], [])
    assert page.count("event-to-publish, ") == page.count("in-hand-to-result, ") == 4
    assert "event_to_publish_ms" not in summarise(JobStats(), facts), "a batch job publishes nothing"


def test_the_age_of_the_backlog_is_that_of_the_last_message_and_none_after_a_while(monkeypatch):
    figures = figures_of_a_minute()
    assert figures.stats().backlog_age_ms > 1e9
    monkeypatch.setattr(live, "_BACKLOG_SECONDS", 0.0)
    assert figures.stats().backlog_age_ms == 0


def test_the_launcher_of_workers_elsewhere_shows_what_they_report(tmp_path):
    """Only what has an outcome is read: the rest comes again, and so does that of a worker that was killed before its report."""
    run, workers = Run(str(tmp_path), "0a1b"), [figures_of_a_minute(), figures_of_a_minute()]
    with run.opened():
        figures = WorkerStats(WorkerReports(run, every_s=0.0))
        assert (figures.line(10.0), figures.stats()) == ("waiting for workers", None)
        workers[0].add_request(Request("m9", images=(ImageRef("gs://b/9"),)), publish_time=0.0)
        figures = WorkerStats(WorkerReports(run, every_s=0.0))
        for each in workers:
            StatsReporter(run, each.stats).flush()
        line, stats = figures.line(seconds=10.0), figures.stats()
        assert line.startswith("196 images, 19.6 images/s, batches of 8.0, event-to-publish p50 ")
        assert re.search(r"backlog age [1-9]\d+\.\d s, 4 dead, 4 skipped$", line)
        assert figures.line(seconds=10.0).startswith("196 images, 0.0 images/s, backlog age ")
    assert (stats.read, stats.detected, stats.failed, stats.skipped) == (204, 196, 4, 4)
    assert math.isfinite(stats.began)
