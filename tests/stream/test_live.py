"""The lines of a streaming job, and the stats behind its summary."""

import re

import numpy as np
import pytest

from pipeline.config import Config
from pipeline.process import PROCESS
from pipeline.records import DeadLetter, DetectedImage, Detections, ImageRef, Timing
from pipeline.report.page import render_report
from pipeline.stats import beam_metrics, counted
from pipeline.stats.counted import COUNTED
from pipeline.stats.job_stats import JobStats
from pipeline.stats.progress import line
from pipeline.stats.summary import RunFacts, summarise


def detected(n, latency_s, led_batch=0, now=1000.0):
    found = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.int32), np.zeros(0, np.float32), ())
    ref = ImageRef(f"gs://b/{n}", event_time=now - latency_s)
    return DetectedImage(ref, 4, 3, "m", "1", found, Timing(led_batch=led_batch, finished_at=now, latency=latency_s / 5))


@pytest.fixture
def minute():
    """The statistics of a minute: 98 results, 2 dead letters, a notification that is no work, and a duplicate."""
    with COUNTED.counting() as stats:
        beam_metrics.note_message(published_at=0.0)
        beam_metrics.count_read(102)
        beam_metrics.count_skipped(2)
        for n in range(98):
            image = detected(n, 0.1 if n < 97 else 10.0, led_batch=8 if n % 8 == 0 else 0)
            beam_metrics.count_results(image)
            beam_metrics.note_published(image, now=1000.0)
        beam_metrics.count_results(DeadLetter(ImageRef(""), "message", "bad_json", "x"))
        beam_metrics.count_results(DeadLetter(ImageRef("gs://b/98"), "read", "not_found", "x"))
        yield stats


def test_a_line_shows_rate_batch_fill_latency_and_failures_since_the_last_one(minute, monkeypatch):
    monkeypatch.setattr(PROCESS, "waiting_for", "")
    stats = COUNTED.stats_of(minute)
    shown = line(stats, JobStats(), seconds=10.0)
    assert shown.startswith("100 of 100 images, 10.0 images/s, batches of 8.0, event-to-publish p50 ")
    times = re.search(r"event-to-publish p50 (\d+) ms p99 (\d+) ms, processing p50 (\d+) ms p99 (\d+) ms", shown)
    for value, (low, high) in zip(map(float, times.groups()), ((50, 250), (5000, 10_001), (10, 50), (1000, 2500)), strict=True):
        assert low <= value <= high
    assert re.search(r", backlog age [1-9]\d+\.\d s, 2 failed, 2 skipped$", shown)
    again = line(stats, stats, seconds=10.0)
    assert re.fullmatch(r"100 of 100 images, 0.0 images/s, backlog age \d+.\d s, 2 failed, 2 skipped", again)


def test_a_line_shows_an_image_that_was_detected_before_the_last_one_and_is_published_after_it():
    before, now = JobStats(), JobStats()
    for stats in (before, now):
        stats.add_detected([detected(1, 0.1)], 0)
    now.publish_latencies.add([0.5])
    assert line(now, before, 10.0) == "1 image, 0.0 images/s, event-to-publish p50 375 ms p99 498 ms, 0 failed"


def test_the_summary_has_both_latencies_under_their_own_names(minute):
    facts = RunFacts(0.0, 0.0, 60.0, "", Config(mode="streaming").as_dict())
    summary = summarise(minute, facts)
    assert (summary["event_to_publish_ms"]["max"], summary["latency_ms"]["max"]) == (10_000, 2000)
    assert {*summary["over_time"]} == {"event_to_publish_ms"}
    page = render_report(summary, [], {})
    assert page.count("event-to-publish, ") == page.count("processing, ") == 4
    assert "event_to_publish_ms" not in summarise(JobStats(), facts), "a batch job publishes nothing"


def test_the_age_of_the_backlog_is_that_of_the_last_message_and_none_after_a_while(minute, monkeypatch):
    assert COUNTED.stats_of(minute).backlog_age_ms > 1e9
    monkeypatch.setattr(counted, "_BACKLOG_SECONDS", 0.0)
    assert COUNTED.stats_of(minute).backlog_age_ms == 0
