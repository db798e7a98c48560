"""What a scrape shows is what the statistics have, in standard units, with a bounded number of series."""

import subprocess

import pytest

from pipeline.failures import REASONS
from pipeline.monitoring import prometheus
from pipeline.process import PARTS
from pipeline.records import DeadLetter, DetectedImage, ImageRef, Timing
from pipeline.stats.histogram import Times
from pipeline.stats.job_stats import JobStats
from tests.monitoring.prometheus import needs_prometheus, samples_in
from tests.stats.test_beam_metrics import NOTHING

MAY_BE_ABSENT = {"detection_model_info", "detection_undelivered_messages"}
ALL_REASONS = {reason for reasons in REASONS.values() for reason in reasons}


def detected(name="a", version="1", **timing):
    times = {"decode": 0.004, "latency": 0.07, "finished_at": 100.0, **timing}
    return DetectedImage(ImageRef(name), 8, 8, "bright", version, NOTHING, Timing(**times))


def samples(stats: JobStats) -> dict:
    """Each sample by its name and the values of its labels."""
    return samples_in(prometheus.page(lambda: stats)({}).content.decode())


def some_stats() -> JobStats:
    stats = JobStats(read=9, skipped=2)
    stats.add_detected([detected(led_batch=8, model=0.02)], samples=0)
    stats.add_detected([detected("b")], samples=0)
    for stage, reason in (("read", "not_allowed"), ("message", "not_allowed"), ("decode", "empty")):
        stats.add_dead(DeadLetter(ImageRef("c"), stage, reason, "", b""))
    stats.batch_sizes, stats.backlog_age_ms = (1, 8), 1500.0
    stats.model_events.update(swaps=1, canary_images=3, canary_ms=250)
    return stats


def test_the_model_is_the_one_in_use_also_where_no_image_comes():
    """A stream without messages would else show the version of its last image for ever."""
    stats = some_stats()
    stats.in_use = ("bright", "2")
    shown = samples(stats)
    assert (shown["detection_model_info", "bright", "2"], ("detection_model_info", "bright", "1") in shown) == (1, False)


def test_before_the_first_image_all_is_there_with_zeros():
    shown = samples(JobStats())
    assert shown["detection_images_total", "detected", ""] == 0
    assert {key[2] for key in shown if key[:2] == ("detection_images_total", "dead")} == ALL_REASONS
    assert {name for name, *_ in shown if name.startswith("detection")} >= {
        each.name for each in prometheus.METRICS if each.kind != "histogram" and each.name not in MAY_BE_ABSENT
    }


def test_counts_are_those_of_the_statistics():
    shown = samples(some_stats())
    expected = {
        ("images_read_total",): 9,
        ("images_total", "detected", ""): 2,
        ("images_total", "skipped", ""): 2,
        ("images_total", "dead", "not_allowed"): 2,
        ("images_total", "dead", "empty"): 1,
        ("images_in_flight",): 2,
        ("batch_images_max",): 8,
        ("backlog_age_seconds",): 1.5,
        ("model_info", "bright", "1"): 1,
        ("model_events_total", "swaps"): 1,
        ("model_events_total", "canary_ms"): 250,
        ("stage_seconds_count", "decode"): 2,
        ("stage_seconds_sum", "decode"): pytest.approx(0.008),
        ("stage_seconds_bucket", "0.0025", "decode"): 0,
        ("stage_seconds_bucket", "0.005", "decode"): 2,
        ("stage_seconds_count", "model"): 1,
        ("batch_images_sum",): 8,
        ("batch_images_bucket", "4.0"): 0,
        ("batch_images_bucket", "8.0"): 1,
        ("latency_seconds_count",): 2,
    }
    assert {key: shown[("detection_" + key[0], *key[1:])] for key in expected} == expected
    assert {key[1] for key in shown if key[0] == "detection_stalled_seconds"} == set(PARTS)
    assert shown["process_resident_memory_bytes",] > 1e6
    buckets = [value for (name, *_), value in shown.items() if name == "detection_latency_seconds_bucket"]
    assert buckets == sorted(buckets) and buckets[-1] == 2


def test_labels_from_elsewhere_make_no_series():
    """A worker's report is a file, which anybody may have written."""
    stats = JobStats()
    stats.dead["read", "made up"] += 1
    stats.stages["made up"] = Times()
    assert not [key for key in samples(stats) if "made up" in key]


@needs_prometheus
def test_promtool_finds_nothing_wrong_with_names_types_and_texts():
    text = prometheus.page(some_stats)({}).content
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=120, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
