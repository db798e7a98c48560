"""Metrics: what Beam counts is what the rows say, in batch and in streams."""

import json
import threading
from pathlib import Path

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from msgspec.structs import replace

from pipeline import graph
from pipeline.config import load_config
from pipeline.outcome.conclude import Conclusion
from pipeline.records import DeadLetter, DetectedImage, Detections, ImageRef, Timing
from pipeline.results.completion import UNKNOWN
from pipeline.results.run_folder import Run
from pipeline.stats import beam_metrics
from pipeline.stats.counted import COUNTED
from pipeline.stats.summary import RunFacts
from pipeline.stream.messages import Message
from pipeline.stream.shared import RunSettings, opened
from pipeline.stream.steps import ParseMessages
from tests.conftest import write_bright_image

NOTHING = Detections(np.zeros((0, 4)), np.zeros(0), np.zeros(0), ())
DETECTED = DetectedImage(ImageRef("a"), 1, 1, "m", "1", NOTHING, Timing(0.25, 0.5, 0.0, 0.125, led_batch=4, model=2.0))
DEAD = DeadLetter(ImageRef("b"), "read", "not_found", "gone")


def counted(result):
    """Counters, and distributions as (sum, count), of a finished pipeline."""
    found = result.metrics().query(beam.metrics.MetricsFilter().with_namespace(beam_metrics.NAMESPACE))
    totals = {}
    for counter in found["counters"]:
        totals[counter.key.metric.name] = totals.get(counter.key.metric.name, 0) + counter.committed
    sums = {}
    for each in found["distributions"]:
        total, number = sums.get(each.key.metric.name, (0, 0))
        sums[each.key.metric.name] = (total + each.committed.sum, number + each.committed.count)
    return totals, sums


@pytest.fixture
def images(tmp_path):
    """Seven images, one of them named twice, one that is none and one that is not there."""
    for n in range(7):
        write_bright_image(tmp_path / "in" / f"{n}.png", (64, 48), (4, 4, 40, 40))
    (tmp_path / "in" / "text.png").write_text("text")
    (tmp_path / "m.txt").write_text(f"{tmp_path}/in/0.png\n{tmp_path}/absent.png\n")
    return tmp_path


@pytest.mark.slow
def test_the_metrics_of_a_batch_job_are_those_of_its_summary(images, bright_model):
    inputs = [f"{images}/in", f"{images}/m.txt"]
    model = {"model.path": bright_model, "detect.batch_sizes": [2]}
    config = load_config([], {"input": inputs, "output": f"{images}/out", **model})
    run = Run(f"{images}/out", "test")
    pipeline = beam.Pipeline(runner=FnApiRunner())
    with run.opened(), COUNTED.counting() as seen:
        end = Conclusion(run, RunFacts(1.0, 1.0, 0.0, "a command", config.as_dict()))
        graph.build(pipeline, config, graph.source_of(config), graph.sink_of(config, run, UNKNOWN), end)
        result = pipeline.run()
        result.wait_until_finish()
    summary = json.loads(Path(run.reports, "summary.json").read_text())

    totals, sums = counted(result)
    assert totals == summary["images"] == {"read": 10, "skipped": 1, "detected": 7, "dead": 2}
    assert totals == {"read": seen.read, "skipped": seen.skipped, "detected": seen.detected, "dead": seen.failed}
    assert {reason: count for (_, reason), count in seen.dead.items()} == summary["dead_by_reason"]
    assert {str(size): number for size, number in seen.batches.items()} == summary["batch_sizes"]
    assert sums["batch_size"] == (sum(size * n for size, n in seen.batches.items()), sum(seen.batches.values()))
    assert sums["model_us"][1] == sum(seen.batches.values())
    for stage in ("read", "decode", "postprocess", "model"):
        total, number = sums[f"{stage}_us"]
        assert 0 <= seen.stages[stage].total_s * 1e6 - total <= number  # whole microseconds
        assert summary["stage_seconds"][stage] == pytest.approx(seen.stages[stage].total_s, abs=1e-3)


def test_what_messages_ask_for_is_counted_where_they_are_parsed():
    messages = [
        Message(b'{"images": [{"uri": "gs://b/1"}, {"uri": "gs://b/2"}, {"uri": "file:///etc/passwd"}]}', publish_time=1.0),
        Message(b"", {"eventType": "OBJECT_DELETE", "bucketId": "b", "objectId": "o", "payloadFormat": "NONE"}),
        Message(b"\x00nothing", publish_time=1.0),
    ]
    with COUNTED.counting() as stats, opened(RunSettings("counted")) as run, beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _ = pipeline | beam.Create(messages) | beam.ParDo(ParseMessages(("gs://",), run.settings)).with_outputs("dead")
    totals, sums = counted(pipeline.result)
    assert totals == {"read": 5, "skipped": 1, "dead": 2}
    assert (stats.read, stats.skipped, stats.failed) == (5, 1, 2)
    assert sums["backlog_age_ms"][1] == 3


def test_the_latency_of_each_image_that_is_published_is_noted():
    published = replace(DETECTED, ref=ImageRef("a", event_time=100.0))
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _ = pipeline | beam.Create([100.0127] * 3) | beam.Map(lambda now: beam_metrics.note_published(published, now))
    assert counted(pipeline.result) == ({}, {"latency_ms": (36, 3)})


@pytest.mark.slow
def test_counts_of_many_threads_add_up():
    threads = [threading.Thread(target=lambda: [beam_metrics.count_results(DETECTED) for _ in range(500)]) for _ in range(8)]
    with COUNTED.counting() as seen:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    beam_metrics.count_results(DETECTED)  # for no one
    assert (seen.detected, seen.batches, seen.failed) == (4000, {4: 4000}, 0)
