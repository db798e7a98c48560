"""The archive of a stream whose steps are in several processes: windows of the runner, whose time may be ahead of a worker's."""

import itertools
import time

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from apache_beam.testing.test_stream import TestStream

from pipeline.codec import register_record_coder
from pipeline.results.shards import list_shards
from pipeline.stream.archive_rows import ArchiveRows
from tests.shard_rows import VERSION, detected, failed, rows_in


def archived(folder, *batches, ahead_s):
    """Archives batches of records that come when time is over for their rows, or is not."""
    register_record_coder()
    coming = TestStream().advance_watermark_to(int(time.time() + ahead_s))
    for batch in batches:
        coming = coming.add_elements(batch)
    options = PipelineOptions(["--streaming"])
    with beam.Pipeline(runner=BundleBasedDirectRunner(), options=options) as pipeline:
        records = pipeline | "Come" >> coming.advance_watermark_to_infinity()
        parts = [
            records | f"Only{kind.__name__}" >> beam.Filter(isinstance, kind).with_output_types(kind)
            for kind in (type(detected("")), type(failed("")))
        ]
        _ = tuple(parts) | "Archive" >> ArchiveRows(str(folder), "0a1b", window_s=3600.0, version=VERSION)


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0], ids=["a puller behind", "a puller that is two hours ahead"])
def test_a_row_is_archived_however_far_clocks_are_apart(ahead_s, tmp_path):
    archived(tmp_path, [detected("b"), failed("x")], [detected("a")], [failed("y")], ahead_s=ahead_s)
    found = [[row["image"]["uri"] for row in rows_in(str(tmp_path), kind)] for kind in ("detections", "dead_letters")]
    assert found == [["a", "b"], ["x", "y"]]
    if ahead_s < 0:
        assert len(list_shards(str(tmp_path))) == 2, "one of each kind"
    views = [line for path in tmp_path.glob("*/*.jsonl") for line in path.open()]
    assert len(views) == len([*itertools.chain(*found)])
