"""The archive of a stream whose steps are in several processes: windows of the runner, whose time may be ahead of a worker's."""

import itertools
import json
import time

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from apache_beam.testing.test_stream import TestStream

from pipeline.records import DeadLetter, ImageRef, dead_letter_row
from pipeline.stream.archive_rows import ArchiveRows


def letters(*names):
    return [DeadLetter(ImageRef(name), "read", "not_found", "no") for name in names]


def archived(folder, *batches, ahead_s):
    """The names of the images in each file, of batches that come when time is over for their rows, or is not."""
    coming = TestStream().advance_watermark_to(int(time.time() + ahead_s))
    for batch in batches:
        coming = coming.add_elements(batch)
    options = PipelineOptions(["--streaming"])
    with beam.Pipeline(runner=BundleBasedDirectRunner(), options=options) as pipeline:
        records = pipeline | "Come" >> coming.advance_watermark_to_infinity()
        _ = records | "Archive" >> ArchiveRows(str(folder), "dead_letters", dead_letter_row, window_s=3600.0, job="0a1b")
    paths = sorted(folder.glob("dead_letters/*.jsonl"))
    return [[json.loads(line)["image"]["uri"] for line in path.open()] for path in paths]


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0], ids=["a puller behind", "a puller that is two hours ahead"])
def test_a_row_is_archived_however_far_clocks_are_apart(ahead_s, tmp_path):
    found = archived(tmp_path, letters("a", "b"), letters("c"), letters("d"), ahead_s=ahead_s)
    assert sorted(itertools.chain(*found)) == ["a", "b", "c", "d"]
