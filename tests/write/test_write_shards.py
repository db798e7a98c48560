"""`WriteShards`: each record is a row of a shard, early and in bounded memory, also where a runner retries bundles."""

import functools

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from pipeline.config import WriteConfig
from pipeline.results.reader import ResultsFolder, list_shards
from pipeline.results.run import Run
from pipeline.stats.job_stats import JobStats
from pipeline.write import write_shards
from pipeline.write.write_shards import Results, WriteShards, _WriteRows, read_stats
from tests.shard_rows import VERSION, detected, failed, rows_in


def at_work(settings):
    step = _WriteRows(settings)
    step.start_bundle()
    return step


def sink(output, **write):
    return WriteShards(Run(str(output), "0a1b"), VERSION, WriteConfig(**write))


@pytest.mark.slow
def test_results_become_rows_and_statistics(tmp_path):
    to = sink(tmp_path)
    with to.run.opened():
        with beam.Pipeline(runner=FnApiRunner()) as pipeline:
            images = pipeline | "Images" >> beam.Create([detected("b.jpg"), detected("a.jpg")])
            dead = pipeline | "Dead" >> beam.Create([failed("c.jpg")])
            counted = pipeline | "Counted" >> beam.Create([JobStats(read=4, skipped=1)])
            _ = Results(images, (dead,), counted) | to
        stats = read_stats(to.run)
    assert (stats.read, stats.detected, stats.failed, stats.skipped) == (4, 2, 1, 1)
    assert [row["image"]["uri"] for row in rows_in(str(tmp_path))] == ["a.jpg", "b.jpg"]
    assert [row["image"]["uri"] for row in rows_in(str(tmp_path), "dead_letters")] == ["c.jpg"]
    assert not (tmp_path / ".staging-0a1b").exists()


def test_rows_appear_while_the_bundle_goes_on(tmp_path):
    """A kill then costs no more than what is held. All files are Parquet."""
    step = at_work(sink(tmp_path, shard_seconds=0.0))
    for n in range(3):
        list(step.process(detected(f"{n}.jpg")))
        assert len(rows_in(str(tmp_path))) == n + 1
    assert list(step.finish_bundle()) == []
    assert {path.suffix for path in (tmp_path / "detections").iterdir()} == {".parquet"}


def test_a_bundle_holds_a_bounded_number_of_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(write_shards, "_MOST_BYTES", 10_000)
    step = at_work(sink(tmp_path, shard_seconds=1e9))
    for n in range(100):
        list(step.process(detected(f"{n}.jpg")))
        assert len(step._records) <= 10
    list(step.finish_bundle())
    assert len(rows_in(str(tmp_path))) == 100


def test_records_become_columns_as_they_come_and_one_sorted_shard_of_each_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(write_shards, "_AT_ONCE", 2)
    step = at_work(sink(tmp_path))
    for record in (detected("d"), detected("b"), failed("z"), detected("a"), detected("c"), failed("y")):
        assert list(step.process(record)) == []
        assert len(step._records) < 2
    (stats,) = (windowed.value for windowed in step.finish_bundle())
    assert (stats.detected, stats.failed) == (4, 2)
    batches = [batch["uri"].to_pylist() for _, batch in ResultsFolder(str(tmp_path)).batches()]
    assert sorted(batches) == [["a", "b", "c", "d"], ["y", "z"]]


def test_a_bundle_that_a_runner_runs_twice_leaves_one_shard(tmp_path):
    """The first attempt dies between its shard and the next step; only the second one's shard gets a name."""
    to = sink(tmp_path)
    to.worker_context = functools.partial(print)  # the steps are elsewhere
    staged = []
    for attempt in range(2):
        step = at_work(to)
        list(step.process(detected("a.jpg")))
        outputs = [each for each in step.finish_bundle() if isinstance(each, beam.pvalue.TaggedOutput)]
        staged.append(outputs[0].value.value)
        assert list_shards(str(tmp_path)) == [], attempt
    write_shards._publish(staged[1])
    assert len(rows_in(str(tmp_path))) == 1
