"""A step of the writing that is done twice, in part or at once, as by a runner that lost a worker: the files are those of one."""

import itertools
import signal

import pytest

from pipeline.config import WriteConfig
from pipeline.records import detection_row, row_bytes
from pipeline.results.layout import DETECTIONS
from pipeline.results.run import Run
from pipeline.stats.summary import JobStats
from pipeline.storage.spill_files import SpillWriter
from pipeline.write.spill_rows import BY_ROWS, Shard
from pipeline.write.write_files import Sizes, WriteFiles, read_written
from tests.results.test_attempts import disturbed, visible
from tests.write.test_write_files import detected

NAMES = [f"{n}.jpg" for n in range(25)]
TALLY = JobStats(read=len(NAMES))
ROWS = {Shard(DETECTIONS, 0, BY_ROWS): len(NAMES)}


@pytest.fixture
def output(tmp_path):
    return f"{tmp_path}/out"


def begun(output):
    """A job whose rows are spilled: its writing, and what comes into the next step."""
    staging = Run(output, "0123456789ab")  # its name stands in names
    staging.begin({"settings": {}})
    spiller = SpillWriter(f"{staging.folder}/spill")
    for name in NAMES:
        list(spiller.add(Shard(DETECTIONS, 0, BY_ROWS), row_bytes(detection_row(detected(name))) + b"\n"))
    spills = [spill for _, spill in spiller.flush()]
    sink = WriteFiles(staging, {}, WriteConfig(parquet=True, tfrecord=True, coco=True), sizes=Sizes(rows_per_file=10))
    return sink, (Shard(DETECTIONS, 0, BY_ROWS), spills)


def commit(sink, files, coco):
    sink._commit(b"", files, TALLY, coco)


@pytest.fixture
def undisturbed(tmp_path):
    sink, shard = begun(f"{tmp_path}/undisturbed")
    files = list(sink._finish(shard, ROWS))
    commit(sink, files, list(sink._write_coco(b"", files, ROWS)))
    return visible(sink.run.output)


def test_two_attempts_at_the_same_shards_side_by_side_do_not_disturb_each_other(output, undisturbed):
    sink, shard = begun(output)
    both = list(zip(sink._finish(shard, ROWS), sink._finish(shard, ROWS), strict=True))  # a file of the one, then of the other
    assert not {one.staged for one, _ in both} & {other.staged for _, other in both}
    mixed = [pair[number % 2] for number, pair in enumerate(both)]  # whichever of the two ended first
    commit(sink, mixed, list(sink._write_coco(b"", mixed, ROWS)))
    assert visible(output) == undisturbed


def test_a_commit_that_died_between_any_two_changes_is_finished_by_the_next_attempt(output, undisturbed):
    """It gets what the first one got; none of it has to lie where it lay then."""
    for number in itertools.count(1):
        sink, shard = begun(output)
        files = list(sink._finish(shard, ROWS))
        coco = list(sink._write_coco(b"", files, ROWS))
        killed = disturbed(number, lambda: commit(sink, files, coco), signal.SIGKILL)  # noqa: B023
        commit(sink, files, coco)
        assert visible(output) == undisturbed, number
        assert read_written(sink.run).stats == TALLY
        sink.run.remove()
        if not killed:
            break
    assert number > 5


def test_a_job_that_begins_again_from_its_start_once_it_has_committed_leaves_that_as_it_is(output, undisturbed):
    """One that leaves out what is done finds all of it done then, by itself; what it counts is not what the run did."""
    sink, shard = begun(output)
    files = list(sink._finish(shard, ROWS))
    commit(sink, files, list(sink._write_coco(b"", files, ROWS)))
    sink._commit(b"", [], [JobStats(read=len(NAMES), skipped=len(NAMES))], [])
    assert visible(output) == undisturbed
    assert read_written(sink.run).stats == TALLY
