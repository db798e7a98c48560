"""The archive of a stream whose steps are in several processes."""

import itertools

import apache_beam as beam
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from pipeline.codec import register_record_coder
from pipeline.results.shards import list_shards
from pipeline.stream import archive_rows
from pipeline.stream.archive_rows import ArchiveRows
from tests.shard_rows import VERSION, detected, failed, rows_in


def archived(folder):
    """Archives two detections and two dead letters that come in two collections."""
    register_record_coder()
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        parts = (
            pipeline | "Detected" >> beam.Create([detected("b"), detected("a")]),
            pipeline | "Failed" >> beam.Create([failed("x"), failed("y")]),
        )
        _ = parts | "Archive" >> ArchiveRows(str(folder), "0a1b", window_s=10.0, version=VERSION)


def test_rows_of_a_kind_become_one_shard_with_a_view(tmp_path):
    archived(tmp_path)
    found = [[row["image"]["uri"] for row in rows_in(str(tmp_path), kind)] for kind in ("detections", "dead_letters")]
    assert found == [["a", "b"], ["x", "y"]]
    assert len(list_shards(str(tmp_path))) == 2, "one of each kind"
    views = [line for path in tmp_path.glob("*/*.jsonl") for line in path.open()]
    assert len(views) == len([*itertools.chain(*found)])


def test_a_shard_has_a_bounded_number_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(archive_rows, "WINDOW_ROWS", 1)
    archived(tmp_path)
    assert len(list_shards(str(tmp_path))) == 4
