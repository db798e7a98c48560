"""Rows become files that are all there or not there at all, and the same for the same input."""

import io
import itertools
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path

import apache_beam as beam
import numpy as np
import pyarrow.parquet as pq
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from pipeline.config import WriteConfig
from pipeline.errors import InputError, OutputError
from pipeline.read.tfrecords import read_records
from pipeline.records import DeadLetter, DetectedImage, Detections, ImageRef
from pipeline.results.layout import check_output
from pipeline.results.run import Run
from pipeline.stats.summary import JobStats
from pipeline.stats.worker_context import WorkerContext
from pipeline.storage.files import write_file
from pipeline.write.sink import Results
from pipeline.write.write_files import SIZES, Sizes, WriteFiles, read_written
from tests.results.test_run import before_change

NO_DEAD_LETTERS = "dead_letters/dead_letters-00000-of-00001.jsonl"
REPORTS = "runs/0123456789ab"
NAMES = ["a.jpg", "b.jpg", "ä\udc80.jpg", "<b>.jpg", *(f"{n}.jpg" for n in range(40))]


def detected(name):
    one = Detections(np.array([[0, 0, 1, 2]], np.float32), np.zeros(1, np.int32), np.ones(1, np.float32), ("cat",))
    return DetectedImage(ImageRef(name, "1"), 10, 20, "m", "3", one)


def write(output, names, dead=(), **settings):
    """Writes rows as a job does: what it leaves for its summary."""
    staging = Run(str(output), "0123456789ab")
    with staging.held({"settings": {}}):
        run(staging, names, dead, **settings)
        stats, notes = read_written(staging)
    assert (stats.read, stats.detected, sum(stats.dead.values())) == (len(names) + len(dead), len(names), len(dead))
    return notes


def run(staging, names, dead=(), *, elsewhere=False, sizes=SIZES, **settings):
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        results = Results(
            pipeline | "Detected" >> beam.Create([detected(name) for name in names]) | beam.Reshuffle(),
            (pipeline | "Dead" >> beam.Create([DeadLetter(ImageRef(name), "read", "not_found", "gone") for name in dead]),),
            pipeline | "Counted" >> beam.Create([JobStats(read=len(names) + len(dead))]),
        )
        at = WorkerContext(staging, lambda: None, time.time()) if elsewhere else None
        _ = results | WriteFiles(staging, {}, WriteConfig(**settings), worker_context=at, sizes=sizes)


def files_of(folder, indexes=False):
    """All files by relative path, hidden ones and staging left out as a reader leaves them out; with `indexes`, all of these."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        name = str(path.relative_to(folder))
        hidden = any(part.startswith(".") for part in name.split("/"))
        if path.is_file() and not hidden and name.startswith("index/") is indexes:
            found[name] = path.read_bytes()
    return found


@pytest.mark.parametrize("shards", [1, 3])
def test_the_same_input_gives_the_same_bytes_whatever_the_order(tmp_path, shards):
    write(tmp_path / "one", NAMES, shards=shards)
    write(tmp_path / "two", NAMES[::-1], shards=shards)
    first, second = files_of(tmp_path / "one"), files_of(tmp_path / "two")
    assert first == second
    assert files_of(tmp_path / "one", indexes=True) == files_of(tmp_path / "two", indexes=True)
    assert first.pop(NO_DEAD_LETTERS) == b""
    assert sorted(first) == [f"detections/detections-{n:05d}-of-{shards:05d}.jsonl" for n in range(shards)]
    rows = [json.loads(line) for content in first.values() for line in content.splitlines()]
    assert sorted(row["image"]["uri"] for row in rows) == sorted(NAMES)
    assert all(content.splitlines() == sorted(content.splitlines()) for content in first.values())


@pytest.mark.parametrize(("rows", "shards"), [(0, 1), (1, 1), (10, 1), (11, 2), (44, 5)])
def test_without_a_number_of_shards_they_follow_the_rows(tmp_path, rows, shards):
    """All rows stand in one order, over all files, whoever wrote them when; dead letters too."""
    sizes = Sizes(rows_per_file=10, spill_bytes=400)
    wanted = {f"detections/detections-{n:05d}-of-{shards:05d}.jsonl": min(10, max(0, rows - 10 * n)) for n in range(shards)}
    for folder, names in (("one", NAMES[:rows]), ("two", NAMES[:rows][::-1])):
        write(
            tmp_path / folder,
            names,
            dead=[f"dead-{n}.jpg" for n in range(25)],
            parquet=True,
            tfrecord=True,
            coco=True,
            sizes=sizes,
        )
    files = files_of(tmp_path / "one")
    assert files == files_of(tmp_path / "two")
    assert {name: files[name].count(b"\n") for name in files if name.startswith("detections/") and name.endswith("l")} == wanted
    lines = [line for name in wanted for line in files[name].splitlines()]
    assert lines == sorted(lines)
    parquet = [pq.read_metadata(tmp_path / "one" / name.replace("jsonl", "parquet")) for name in wanted]
    assert [each.num_rows for each in parquet] == list(wanted.values())
    examples = [read_records(io.BytesIO(files[name.replace("jsonl", "tfrecord")]), name, 1 << 20) for name in wanted]
    assert [len(list(each)) for each in examples] == list(wanted.values())
    listed = json.loads(files[f"{REPORTS}/coco/images.json"])["images"]
    assert [image["file_name"] for image in listed] == [json.loads(line)["image"]["uri"] for line in lines]
    dead = [files[f"dead_letters/dead_letters-{n:05d}-of-00003.jsonl"] for n in range(3)]
    assert [part.count(b"\n") for part in dead] == [10, 10, 5]
    assert b"".join(dead).splitlines() == sorted(b"".join(dead).splitlines())


def test_many_workers_merge_the_rows_of_a_job_elsewhere_into_files_in_one_order(tmp_path):
    """Files follow each other over all ranges, with none left out; a second run of the same job gives the same."""
    sizes = Sizes(rows_per_file=10, rows_per_range=12, spill_bytes=400)
    for folder, names in (("one", NAMES), ("two", NAMES[::-1])):
        write(tmp_path / folder, names, dead=[f"dead-{n}.jpg" for n in range(25)], elsewhere=True, coco=True, sizes=sizes)
    files = files_of(tmp_path / "one")
    assert files == files_of(tmp_path / "two")
    for kind, rows in (("detections", len(NAMES)), ("dead_letters", 25)):
        named = sorted(name for name in files if name.startswith(f"{kind}/"))
        assert rows / 10 <= len(named) <= rows / 10 + 3
        assert named == [f"{kind}/{kind}-{n:05d}-of-{len(named):05d}.jsonl" for n in range(len(named))]
        lines = [line for name in named for line in files[name].splitlines()]
        assert len(lines) == rows and lines == sorted(lines)
        assert all(0 < files[name].count(b"\n") <= 10 for name in named)


def test_coco_of_more_images_than_one_file_holds_is_left_out_and_said(tmp_path):
    (note,) = write(tmp_path / "out", ["a.jpg", "b.jpg", "c.jpg"], coco=True, sizes=Sizes(coco_images=2))
    assert note.startswith("coco/ is not written: it would be one file of 3 images, and 2 are the most")
    assert sorted(files_of(tmp_path / "out")) == [NO_DEAD_LETTERS, "detections/detections-00000-of-00001.jsonl"]
    assert write(tmp_path / "out", ["a.jpg", "b.jpg"], coco=True, sizes=Sizes(coco_images=2)) == ()
    assert f"{REPORTS}/coco/results.json" in files_of(tmp_path / "out")


def test_shards_without_a_row_are_empty_files(tmp_path):
    write(tmp_path, ["a.jpg"], shards=2)
    files = files_of(tmp_path)
    shards = [files.pop(f"detections/detections-{n:05d}-of-00002.jsonl") for n in range(2)]
    assert (sorted(map(bool, shards)), files) == ([False, True], {NO_DEAD_LETTERS: b""})


def test_a_run_that_read_nothing_leaves_earlier_results_alone(tmp_path):
    write(tmp_path, ["a.jpg"])
    before = files_of(tmp_path)
    write(tmp_path, [])
    assert files_of(tmp_path) == before


def test_a_job_without_a_launcher_fails_where_too_many_of_its_images_did(tmp_path):
    """A template's: nobody else would say that it has committed nothing."""
    sink = WriteFiles(Run(str(tmp_path), "0123456789ab"), {"max_dead_share": 0.5}, WriteConfig(), launched=False)
    stats = JobStats(read=2, dead=Counter({("read", "not_found"): 2}))
    with pytest.raises(OutputError, match="100% of the images failed, so nothing is committed"):
        sink._commit(b"", (), stats)
    assert files_of(tmp_path) == {}


def test_shards_of_an_earlier_run_go_and_other_peoples_files_stay(tmp_path):
    output = tmp_path / "out[1]"
    write(output, NAMES, shards=3, parquet=True)
    (output / "detections" / "notes.txt").write_text("mine")
    (output / "detections" / "detections-final.jsonl").write_text("mine too")
    write(output, ["a.jpg"], shards=1)
    assert sorted(files_of(output)) == [
        NO_DEAD_LETTERS,
        "detections/detections-00000-of-00001.jsonl",
        "detections/detections-final.jsonl",
        "detections/notes.txt",
    ]


def test_a_run_that_fails_before_the_end_leaves_nothing_that_a_reader_sees(tmp_path):
    with pytest.raises(Exception, match=r"coco_ground_truth .*no-such-file"):
        write(tmp_path, ["a.jpg", "b.jpg"], coco=True, coco_ground_truth=str(tmp_path / "no-such-file"))
    assert os.listdir(tmp_path) == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    write_file(f"{tmp_path}/deep/report.html", b"one")
    write_file(f"{tmp_path}/deep/report.html", b"two")
    assert files_of(tmp_path) == {"deep/report.html": b"two"}


class TestCheckOutput:
    def test_what_is_missing_is_made_only_when_writing(self, tmp_path):
        check_output(f"{tmp_path}/new/deep", write=False)
        assert os.listdir(tmp_path) == []
        check_output(f"{tmp_path}/new[1]/deep")
        assert os.listdir(tmp_path / "new[1]" / "deep") == []

    def test_one_that_is_stopped_at_any_moment_leaves_nothing(self, tmp_path):
        def is_stopped(number):
            working = [True]

            def stop():
                if working:
                    raise KeyboardInterrupt

            before_change(number, stop, thread=threading.get_ident())
            try:
                check_output(str(tmp_path))
            except KeyboardInterrupt:
                return True
            finally:
                working.clear()
            return False

        left = [os.listdir(tmp_path) for _ in itertools.takewhile(is_stopped, itertools.count(1))]
        assert len(left) > 2 and not any(left)

    @pytest.mark.parametrize("write", [True, False])
    @pytest.mark.parametrize("place", ["file", "file/deep", "nosuchscheme://x"])
    def test_a_place_that_cannot_be_written_is_one_clear_error(self, tmp_path, monkeypatch, place, write):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").touch()
        with pytest.raises(OutputError, match=f"output {place}: ") as caught:
            check_output(place, write)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "truth", [None, '{"images": [{"id": 7, "file_name": "x/a.jpg"}], "categories": [{"id": 1, "name": "cat"}]}']
)
def test_images_that_the_ground_truth_does_not_name_are_said(tmp_path, truth):
    path = tmp_path / "truth.json"
    path.write_text(truth or "{}")
    notes = write(tmp_path / "out", ["a.jpg", "b.jpg", "c.jpg"], coco=True, coco_ground_truth=str(path) if truth else None)
    assert notes == ((f"coco/ leaves out 2 images that {path} does not name",) if truth else ())


def test_a_ground_truth_that_is_none_is_refused_before_the_job_starts(tmp_path):
    sink = WriteFiles(
        Run(f"{tmp_path}/out", "x"), {"mode": "batch"}, WriteConfig(coco=True, coco_ground_truth=f"{tmp_path}/none.json")
    )
    with pytest.raises(InputError, match=r"^coco_ground_truth .*none\.json: expected COCO annotations"):
        sink.check(write=False)
