"""What a power cut or somebody else leaves in a results folder: nothing runs, nothing outside is touched, no job ends for it."""

import json
import os
import pickle
import shutil
import time
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pytest

from pipeline.__main__ import main
from pipeline.commands import compact as compaction
from pipeline.config import load_config
from pipeline.errors import BusyError, OutputError
from pipeline.outcome.conclude import Conclusion
from pipeline.records import DetectedImage, Detections, ImageRef, row_bytes
from pipeline.results import layout
from pipeline.results.compact import compact
from pipeline.results.current import current_rows
from pipeline.results.layout import DETECTIONS, check_output, check_reports
from pipeline.results.lock import locked
from pipeline.results.reader import KINDS, list_shards
from pipeline.results.rows import rows_by_kind
from pipeline.results.run_folder import Run, remove_abandoned
from pipeline.results.shards import write_shard
from pipeline.stats.job_stats import JobStats
from pipeline.stats.summary import RunFacts
from pipeline.stats.worker_reports import WorkerReports
from pipeline.storage.files import write_file
from tests.shard_rows import VERSION, detected, failed, rows_in, write_rows


@pytest.fixture
def output(tmp_path):
    """A results folder with rows of two runs, and files beside it that nobody may touch."""
    write_file(f"{tmp_path}/outside/secret.txt", b"secret")
    write_file(f"{tmp_path}/secret.txt", b"secret")
    for name in ("a", "b"):
        write_rows(f"{tmp_path}/out", [detected(name)], run=f"{name}1")
    yield f"{tmp_path}/out"
    for path in ("outside/secret.txt", "secret.txt"):
        assert (tmp_path / path).read_bytes() == b"secret"
    assert sorted(os.listdir(tmp_path)) == ["out", "outside", "secret.txt"]
    assert os.listdir(tmp_path / "outside") == ["secret.txt"]


def work_there(output, own=None):
    """What the next job and the next compaction do in the folder; `own` lies in the job's folder while it works."""
    check_output(output)
    check_reports(output)
    run = Run.new(output)
    with locked(output, "0a"), run.opened():
        for name, content in (own or {}).items():
            write_file(f"{run.folder}/{name}", content)
        assert WorkerReports(run).now() == JobStats()
        write_rows(output, [detected("c")], run=run.name)
    remove_abandoned(output)
    compact(output)


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b'{"what": [], "pid": {}, "since": "x"}', b"[" * 100_000, b"\xff\xfe\x00"])
def test_a_planted_lock_on_storage_is_described_as_far_as_it_can_be(content, bucket):
    """It keeps others out for as long as a lock without heartbeats does, whatever times it names."""
    write_file(f"{bucket}/out/.lock-0a", content)
    with pytest.raises(BusyError, match="another run is processing"), locked(f"{bucket}/out", "0a"):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_whose_extra_is_none_that_this_program_writes_is_a_row_without_it(tmp_path, kind):
    """Deep JSON ended each export; rows beside it are as they were."""
    texts = ["[" * 100_000, '{"a":' * 900 + "1" + "}" * 900, "{", "[1]", "3", '{"camera": 7}']
    records = [(detected if kind == DETECTIONS else failed)(f"{number}.jpg") for number in range(len(texts))]
    (_, table) = next(rows_by_kind(records, VERSION, "0a1b"))
    place = table.schema.get_field_index("extra")
    write_shard(str(tmp_path), kind, table.set_column(place, "extra", pa.array(texts)), "0a1b")
    rows = [json.loads(row_bytes(row)) for row in current_rows(str(tmp_path), kind=kind, sort=True)]
    assert [row.get("extra") for row in rows] == [*[None] * 5, {"camera": 7}]


class Planted:
    """What runs where it is unpickled."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (self._path,)


@pytest.mark.parametrize("name", ["figures/0a", "submitted", "open"])
def test_a_planted_pickle_never_runs(name, output):
    planted = pickle.dumps(Planted(f"{output}/it_ran"))
    work_there(output, {name: planted + len(planted).to_bytes(8, "big") + b"complete"})
    assert not os.path.exists(f"{output}/it_ran")


def test_unfinished_files_of_killed_runs_go_after_a_day_and_nothing_that_links_lead_to(output, tmp_path):
    """The youngest file of a run counts."""
    for run, age in (("old", 90_000), ("young", 80_000)):
        for name in ("a.parquet", "deep/b.parquet"):
            write_file(path := f"{output}/.staging-{run}/{name}", b"")
            os.utime(path, (0, 0) if name == "a.parquet" else (time.time() - age,) * 2)
    for link in (f"{output}/.staging-old/link", f"{output}/.staging-link"):
        os.symlink(tmp_path / "outside", link)
    write_file(f"{output}/detections/.staging-young", b"")
    write_file(unnamed := f"{output}/detections/.staging-old", b"")
    os.symlink(tmp_path / "outside" / "secret.txt", f"{output}/detections/.staging-link")
    for path in (f"{output}/.staging-old", unnamed, tmp_path / "outside" / "secret.txt"):
        os.utime(path, (time.time() - 90_000,) * 2)
    work_there(output)
    assert os.path.islink(f"{output}/.staging-link") and not os.path.exists(f"{output}/.staging-old")
    assert len([*Path(output).glob(".staging-young/**/*.parquet")]) == 2
    assert sorted(path.name for path in Path(output).glob("detections/.*")) == [".staging-link", ".staging-young"]


@pytest.mark.parametrize("name", ["summary.json", "report.html"])
def test_what_a_run_would_replace_of_somebody_else_is_refused_in_one_line(name, output):
    check_reports(output)
    write_file(f"{output}/{name}", b'{"accuracy": 0.9}')
    with pytest.raises(OutputError, match=f"{name} there is not of this program and would be replaced; move it, or give another"):
        check_reports(output)


def reported(output, samples):
    """Writes the reports of a run with one image."""
    thumbnail = cv2.imencode(".jpg", np.zeros((48, 64, 3), np.uint8))[1].tobytes()
    nothing = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.int32), np.zeros(0, np.float32), ())
    stats = JobStats(read=1)
    stats.add_detected([DetectedImage(ImageRef("a.jpg"), 64, 48, "m", "1", nothing, thumbnail=thumbnail)], 3)
    facts = RunFacts(0.0, 1.0, 2.0, "command", load_config([], {"write.samples": samples}).as_dict())
    Conclusion(Run(output, "0a1b"), facts).reported(stats)


def test_what_this_program_wrote_is_replaced_and_samples_of_somebody_else_stay(output):
    for name in ("samples/003-photo.jpg", "samples/mine.jpg"):
        write_file(f"{output}/{name}", b"photo")
    reported(output, 1)
    check_reports(output)
    reported(output, 0)
    assert sorted(os.listdir(f"{output}/samples")) == ["003-photo.jpg", "mine.jpg"]
    os.remove(f"{output}/summary.json")
    check_reports(output)


@pytest.mark.parametrize(
    "listed", ["../secret.txt", "photo.jpg", "detections", "exports/../../secret.txt", "samples/.staging-a/../../../secret.txt"]
)
def test_a_planted_summary_has_nothing_deleted_that_is_no_sample(listed, output):
    write_file(f"{output}/photo.jpg", b"photo")
    reported(output, 0)
    shards = [os.path.relpath(shard.path, output) for shard in list_shards(output, (DETECTIONS,))]
    summary = json.loads(Path(f"{output}/summary.json").read_text())
    write_file(f"{output}/summary.json", json.dumps({**summary, "samples": [listed, *shards]}).encode())
    reported(output, 0)
    assert Path(f"{output}/photo.jpg").read_bytes() == b"photo"
    assert [row["image"]["uri"] for row in rows_in(output)] == ["a", "b"]


@pytest.mark.parametrize("what", ["a folder", "a link", "a pipe"])
def test_something_else_in_the_place_of_a_lock_stops_nobody(what, output):
    """D19: a folder `.lock-compact` ended each compaction."""
    lock = f"{output}/.lock-compact"
    if what == "a folder":
        os.mkdir(lock)
    elif what == "a link":
        os.symlink("nothing", lock)
    else:
        os.mkfifo(lock)
    assert compact(output).before == 2


@pytest.mark.parametrize("name", ["summary.json", "report.html"])
def test_a_file_of_any_size_in_the_place_of_a_report_takes_no_memory(name, output):
    """D19: sparse, of 40 GB."""
    with open(f"{output}/{name}", "wb") as file:
        file.truncate(40_000_000_000)
    check_reports(output)
    assert layout.read_summary(output) == {}


@pytest.mark.parametrize(
    ("verb", "flags"), [("compact", ()), ("load", ("--table", "p.d.t", "--output")), ("check", ()), ("rows", ())]
)
def test_a_folder_that_holds_no_results_is_a_wrong_command(verb, flags, output, capsys, monkeypatch):
    """D16: `compact out/detections` was a success, and cron never alarmed."""
    monkeypatch.setenv("BIGQUERY_EMULATOR_HOST", "http://127.0.0.1:9")
    assert main([verb, *flags, f"{output}/detections"]) == 2
    assert "expected the results folder of an earlier run, found no results in it" in capsys.readouterr().err


def test_a_folder_of_results_that_is_a_link_is_refused(output, tmp_path, capsys):
    shutil.rmtree(f"{output}/detections")
    os.symlink(tmp_path / "outside", f"{output}/detections")
    said = "expected detections to be a folder of its own, it is a link"
    with pytest.raises(OutputError, match=said):
        check_output(output)
    assert compaction.main([output]) == 2 and said in capsys.readouterr().err
