"""Shards: what is written is read back, whatever it is called, and a name is never used twice."""

import json
import os
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from pipeline.log_lines import log_lines
from pipeline.records import DeadLetter, DetectedImage, Detections, ImageRef, dead_letter_row, detection_row, row_bytes
from pipeline.results.compact import compact
from pipeline.results.completion import row_keys
from pipeline.results.current import current_rows
from pipeline.results.reader import ResultsFolder, done_keys, list_shards
from pipeline.results.rows import dead_letters_table, detections_table
from pipeline.results.run_folder import Run
from pipeline.results.shards import add_rows, parquet_bytes, write_shard
from pipeline.storage.files import read_file, write_file
from tests.shard_rows import VERSION, detected, failed, rows_in, write_rows

NAMES = ["a.jpg", "häslein.jpg", "\udc80.jpg", "x\\udc80.jpg", "gs://b/a,b.jpg", "=1+1.jpg", "a\n.jpg", "😀" * 50]


@pytest.fixture(params=["local", "gs"])
def output(request, tmp_path):
    return f"{tmp_path}/out" if request.param == "local" else f"gs://{request.getfixturevalue('gcs_bucket').name}/out"


def image(uri, boxes=2, extra=""):
    values = np.random.default_rng(boxes).uniform(-5, 4000, (boxes, 5)).astype(np.float32)
    names = tuple(f"cläss {n}" for n in range(boxes))
    found = Detections(values[:, :4], np.arange(boxes, dtype=np.int32), values[:, 4], names)
    return DetectedImage(ImageRef(uri, "17", extra=extra), 640, 480, "yolo", "7", found)


@pytest.mark.slow
def test_rows_are_read_back_as_they_were_whatever_they_are_called(output):
    """The shard and the JSON rows are the same rows; no box is an empty list."""
    images = sorted((image(uri, n, '{"camera": 7}' * (n == 1)) for n, uri in enumerate(NAMES)), key=lambda each: each.ref.uri)
    letters = [DeadLetter(ImageRef(uri, "1"), "read", "not_found", "gone") for uri in NAMES]
    letters.append(DeadLetter(ImageRef("", record="a.tfrecord@1-2"), "message", "bad_json", "no", b"\xff{", "yolo", "7"))
    write_shard(output, "detections", detections_table(images, VERSION, "run", 1.5), "run")
    write_shard(output, "dead_letters", dead_letters_table(letters, VERSION, "run", 1.5), "run")
    assert rows_in(output) == sorted(map(detection_row, images), key=row_bytes)
    assert rows_in(output, "dead_letters") == sorted(map(dead_letter_row, letters), key=row_bytes)
    ((_, batch),) = ResultsFolder(output, ("detections",)).batches(columns=["key", "uri", "generation", "made_at"])
    assert batch["key"].to_pylist() == row_keys((each.ref.uri, "17", *VERSION[:3]) for each in images).tolist()
    assert batch["made_at"][0].as_py().timestamp() == 1.5


def test_rows_are_added_once_however_often_that_is_tried_and_each_run_adds_its_own(output):
    """An attempt that is repeated has other times; a run that detects all again has the same keys. The newest row counts."""
    records = [detected("a.jpg"), detected("b.jpg")]
    first, again = Run(output, "0a1b", 1e9), Run(output, "0a1c", 1e9)
    paths = {
        add_rows(first, "detections", detections_table(records[::order], VERSION, "0a1b", made_at))
        for order, made_at in ((1, 1.0), (-1, 2.0), (1, 3.0))
    }
    assert len(paths) == 1 and [row["image"]["uri"] for row in rows_in(output)] == ["a.jpg", "b.jpg"]
    assert "/detections/20010909T014640Z-0a1b-" in paths.pop()
    add_rows(again, "detections", detections_table(records, VERSION, "0a1c", 4.0))
    assert len(rows_in(output)) == 4 and len([*current_rows(output)]) == 2
    add_rows(first, "detections", detections_table(records[:1], VERSION, "0a1b", 5.0))
    assert len(list_shards(output)) == 3, "other cuts are other keys"


def test_a_message_that_asks_again_adds_its_row_again(output):
    run, table = Run(output, "0a1b", 1.0), detections_table([detected("a.jpg")], VERSION, "0a1b", 1.0)
    for asked_by in (["m1"], ["m1"], ["m2"]):
        add_rows(run, "detections", table, asked_by)
    assert len(rows_in(output)) == 2


def status(path):
    """What changes when a file does; the time of the last access changes when it is read."""
    found = os.lstat(path)
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns


@pytest.mark.parametrize("planted", ["other rows", "damage", "nothing", "a folder", "a link"])
def test_a_file_that_has_the_name_already_and_other_rows_is_left_and_the_rows_are_added(tmp_path, planted):
    """Only keys that are read back show that a shard is there."""
    run, table = Run(f"{tmp_path}/out", "0a1b", 1.0), detections_table([detected("a.jpg")], VERSION, "0a1b", 1.0)
    path = Path(add_rows(run, "detections", table))
    whole = path.rename(tmp_path / "whole")
    if planted == "a folder":
        path.mkdir()
    elif planted == "a link":
        path.symlink_to(whole)
    else:
        others = parquet_bytes(detections_table([detected("b.jpg")], VERSION, "0a1b", 1.0))
        path.write_bytes({"other rows": others, "damage": whole.read_bytes()[:-9], "nothing": b""}[planted])
    before = status(path)
    added = [add_rows(run, "detections", table) for _ in range(2)]
    assert added[0] == added[1] != str(path) and status(path) == before
    assert "a.jpg" in [row["image"]["uri"] for row in rows_in(run.output)]


def test_rows_that_a_compaction_has_merged_may_be_added_again(output):
    """The first attempt's shard is gone; its repeat fails nothing, and no row counts twice."""
    run, table = Run(output, "0a1b", 1.0), detections_table([detected("a.jpg")], VERSION, "0a1b", 1.0)
    path = add_rows(run, "detections", table)
    write_rows(output, [detected("b.jpg")])
    assert compact(output).files == 1 and add_rows(run, "detections", table) == path
    assert sorted(row["image"]["uri"] for row in current_rows(output)) == ["a.jpg", "b.jpg"]


def test_on_object_storage_a_shard_overwrites_no_object(bucket, monkeypatch):
    """The same content is its own: the answer to the first try was lost."""
    output, table = f"{bucket}/out", detections_table([detected("a.jpg")], VERSION, "run", 1.0)
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=7))
    monkeypatch.setattr(time, "time", lambda: 1.0)
    path = write_shard(output, "detections", table, "run")
    assert write_shard(output, "detections", table, "run") == path
    write_file(path, b"there")
    with pytest.raises(FileExistsError):
        write_shard(output, "detections", table, "run")
    assert read_file(path) == b"there"


@pytest.mark.slow
def test_a_reader_that_sees_a_merged_shard_and_its_sources_counts_each_row_once(output):
    """And one that names sources, as a merged shard of 0.1.0 did, hides none of them."""
    sources = [write_rows(output, [detected(f"{n}.jpg")], made_at=1.0)[0].rpartition("/")[2] for n in range(3)]
    before = rows_in(output)
    table = detections_table([detected(f"{n}.jpg") for n in range(2)], VERSION, "run", 1.0)
    merged = table.replace_schema_metadata({b"sources": json.dumps(sources).encode()})
    write_shard(output, "detections", merged, "compact")
    assert sorted(current_rows(output), key=row_bytes) == before and len(list_shards(output)) == 4
    assert len(np.unique(done_keys(output, VERSION, "detections"))) == 3


@log_lines()
def test_a_damaged_shard_costs_a_line_and_not_the_job(tmp_path, capsys):
    (good,) = write_rows(f"{tmp_path}", [detected("a.jpg")])
    content = Path(good).read_bytes()
    for number, damage in enumerate((b"", b"PAR1", content[:-20], content[:30] + b"\0" * 50 + content[80:])):
        Path(good.replace(good[-40:-8], f"{number:032x}")).write_bytes(damage)
    os.symlink(good, good.replace(good[-40:-8], f"{9:032x}"))
    assert row_keys([("a.jpg", "1", *VERSION[:3])]) in done_keys(f"{tmp_path}", VERSION, "detections")
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" cannot be read")[0][-40:-8] for line in said] == [f"{number:032x}" for number in range(4)]


def test_a_detection_and_a_dead_letter_of_one_image_have_one_key_and_equal_ones_without_an_image():
    letters = [DeadLetter(ImageRef(""), "message", "bad_json", "no", payload) for payload in (b"1", b"2", b"2")]
    one, two, again, letter = dead_letters_table([*letters, failed("a.jpg")], VERSION, "run", 1.0)["key"].to_pylist()
    assert one != two == again
    (row,) = detections_table([detected("a.jpg")], VERSION, "run", 1.0)["key"].to_pylist()
    assert [letter] == [row] == row_keys([("a.jpg", "1", *VERSION[:3])]).tolist()
