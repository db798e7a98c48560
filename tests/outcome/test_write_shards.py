"""`WriteShards`: each record is a row of a shard, early and in bounded memory, also where a runner retries bundles."""

import dataclasses

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that, equal_to

from pipeline.config import WriteConfig
from pipeline.outcome import write_shards
from pipeline.outcome.write_shards import Results, WriteShards, _WriteRows
from pipeline.results.current import current_rows
from pipeline.results.reader import ResultsFolder, list_shards
from pipeline.results.run_folder import Run
from pipeline.stats.job_stats import JobStats
from pipeline.worker import WorkerContext
from tests.shard_rows import VERSION, detected, failed, rows_in


def at_work(settings):
    step = _WriteRows(settings)
    step.start_bundle()
    return step


def sink(output, **write):
    return WriteShards(Run(str(output), "0a1b"), VERSION, WriteConfig(**write))


@pytest.mark.slow
def test_results_become_rows_and_statistics(tmp_path):
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        images = pipeline | "Images" >> beam.Create([detected("b.jpg"), detected("a.jpg")])
        dead = pipeline | "Dead" >> beam.Create([failed("c.jpg")])
        counted = pipeline | "Counted" >> beam.Create([JobStats(read=4, skipped=1)])
        stats = Results(images, (dead,), counted) | sink(tmp_path)
        sums = stats | beam.Map(lambda stats: (stats.read, stats.detected, stats.failed, stats.skipped))
        assert_that(sums, equal_to([(4, 2, 1, 1)]))
    assert [row["image"]["uri"] for row in rows_in(str(tmp_path))] == ["a.jpg", "b.jpg"]
    assert [row["image"]["uri"] for row in rows_in(str(tmp_path), "dead_letters")] == ["c.jpg"]
    assert not [*tmp_path.glob(".*")]


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


def test_a_bundle_that_a_runner_repeats_with_other_cuts_leaves_no_row_that_counts_twice(tmp_path):
    """The first attempt dies with some shards written; the repeat is divided elsewhere; its statistics are of all rows."""
    to, images = sink(tmp_path, shard_seconds=0.0), [detected(f"{n}.jpg") for n in range(6)]
    first = at_work(to)
    for image in images[:3]:
        list(first.process(image))
    assert len(rows_in(str(tmp_path))) == 3, "they are readable before the job ends"
    for _ in range(2):  # the runner has lost the answer to the second attempt
        again = at_work(dataclasses.replace(to, write=WriteConfig()))
        for image in images[:2]:
            list(again.process(image))
        again._sink.write = WriteConfig(shard_seconds=0.0)
        found = [each for image in images[2:] for each in again.process(image)]
        assert sum(stats.detected for stats in found) == 6
    assert sorted(row["image"]["uri"] for row in current_rows(str(tmp_path))) == [image.ref.uri for image in images]
    assert sum(len(shard.path) > 0 for shard in list_shards(str(tmp_path))) == 3 + 1 + 3, "0, 1, 2; 0 to 2; 3, 4, 5"


def test_steps_elsewhere_write_final_shards_too(tmp_path):
    """And nothing else: what a launcher that dies leaves are rows."""
    to = dataclasses.replace(sink(tmp_path), worker_context=WorkerContext(Run(str(tmp_path), "0a1b"), list))
    step = at_work(to)
    list(step.process(detected("a.jpg")))
    list(step.finish_bundle())
    to.run.remove()
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".parquet"] and len(rows_in(str(tmp_path))) == 1
