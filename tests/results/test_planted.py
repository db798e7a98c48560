"""What a power cut or somebody else leaves in a results folder: nothing runs, nothing outside is touched, no job ends for it."""

import json
import os
import pickle
import shutil
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from pipeline.results.lease import leased
from pipeline.results.ledger import list_files_of_rows, read_entries
from pipeline.results.other_runs import committed_states, finish_dead, others, remove_dead, runs_at_work, take_over_killed
from pipeline.results.reports import check_reports, replaced_files
from pipeline.results.resume_points import resume_points_of
from pipeline.write.write_files import read_written

from pipeline.compact import compact
from pipeline.config import WriteConfig
from pipeline.errors import OutputError
from pipeline.launch.finalize import JobReport
from pipeline.records import DetectedImage, Detections, ImageRef
from pipeline.results.layout import StagedFile, read_summary
from pipeline.results.run import Run, fence
from pipeline.stats.summary import JobStats, RunFacts
from pipeline.stats.worker_reports import WorkerReports
from pipeline.storage.files import write_file
from pipeline.stream.archive import Archive
from tests.results.test_run import dies_at

UNREADABLE = {
    "empty": b"",
    "zeros": b"\0" * 40,
    "cut off": b'{"settings": {"mode": "ba',
    "a list": b"[1, 2]",
    "a number": b"3",
    "a text": b'"text"',
    "null": b"null",
    "of wrong types": b'{"state": "running", "settings": 3, "run": [], "images": 1, "config": 2, "mode": 3}',
    "of a wrong commit": b'{"state": "committed", "settings": {}, "commit": {"names": {"a": 1}, "gone": []}}',
    "of an unknown state": b'{"state": "paused", "settings": {"mode": "batch"}}',
    "done without a commit": b'{"state": "done", "settings": {"mode": "batch"}}',
    "deep": b"[" * 100_000,
    "no text": b"\xff\xfe\x00",
    "of long numbers": b'{"started_at": 1' + b"0" * 5000 + b"}",
}
STATES = ["run.json", "written", "figures/0a", "spill/0a.resume"]
ROWS = "detections/detections-3f2a9c01-00000-of-00001.jsonl"
MORE = "detections/detections-4f2a9c01-00000-of-00001.jsonl"


def row(name):
    detection = {"image": {"uri": name, "generation": "1", "width": 1, "height": 1}, "model": {"name": "m", "version": "1"}}
    return json.dumps({**detection, "detections": []}).encode() + b"\n"


@pytest.fixture
def output(tmp_path):
    """A results folder with rows of two runs, and files beside it that nobody may touch."""
    write_file(f"{tmp_path}/outside/secret.txt", b"secret")
    write_file(f"{tmp_path}/secret.txt", b"secret")
    for name, image in ((ROWS, "a"), (MORE, "b")):
        write_file(f"{tmp_path}/out/{name}", row(image))
    yield f"{tmp_path}/out"
    for path in ("outside/secret.txt", "secret.txt"):
        assert (tmp_path / path).read_bytes() == b"secret"
    assert sorted(os.listdir(tmp_path)) == ["out", "outside", "secret.txt"]
    assert os.listdir(tmp_path / "outside") == ["secret.txt"]


def images_in(output):
    """The images that have rows."""
    lines = [line for path in Path(output).glob("detections/*.jsonl") for line in path.read_bytes().splitlines()]
    return sorted(json.loads(line)["image"]["uri"] for line in lines)


def dead(output, **files):
    """The staging folder of a run that was killed, with these files in it."""
    staging = Run.new(output)

    def die():
        with staging.held({"settings": {"mode": "batch"}, "same": "command"}):
            os._exit(0)

    dies_at(1000, die)
    for name, content in files.items():
        write_file(f"{staging.folder}/{name}", content)
    return staging


def work_there(output):
    """What the next job and the next compaction do in the folder."""
    finish_dead(output)
    list(committed_states(output))
    runs_at_work(output)
    staging = Run.new(output)
    with (
        leased(staging.folder, ["x/**"], wait_s=0.0, lost=lambda: None, fence=fence),
        staging.held({"settings": {"mode": "batch"}}),
    ):
        take_over_killed(staging, "command")
        list(resume_points_of(staging.folder))
        check_reports(output)
        write_file(f"{staging.folder}/0123456789abcdef0123456789abcdef/rows", row("c"))
        staging.commit([StagedFile(f"{staging.folder}/0123456789abcdef0123456789abcdef/rows", ROWS.replace("3f", "5f"))])
        remove_dead(output, but=staging)
    compact(output)


@pytest.mark.slow
@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("name", STATES)
def test_a_state_that_cannot_be_read_counts_as_absent(name, content, output):
    staging = dead(output, **{name: content})
    work_there(output)
    assert images_in(output) == ["a", "b", "c"]
    assert not os.path.exists(staging.folder)


def test_this_is_said_in_one_line_that_names_the_file(output, capfd):
    staging = dead(output, **{"run.json": b""})
    finish_dead(output)
    list(committed_states(output))
    remove_dead(output)
    said = [line for line in capfd.readouterr().err.splitlines() if line]
    assert len(said) == 1 and said[0].startswith(f"warning: {staging.folder}/run.json cannot be read and counts as absent: ")


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize(
    "name", ["summary.json", ".lease-0a1b", ".lease-0a1b.new", "index/detections-3f2a9c01-00000-of-00001.parquet"]
)
def test_so_does_what_lies_in_the_results_folder(name, content, output):
    write_file(f"{output}/{name}", content)
    assert read_summary(output) == {}
    staging = Run.new(output)
    with leased(staging.folder, ["x/**"], wait_s=0.0, lost=lambda: None, fence=fence):
        pass
    for file in list_files_of_rows(output):
        assert len(list(read_entries(file))) == 1
    compact(output)
    assert images_in(output) == ["a", "b"]


@pytest.mark.parametrize("content", [content for content in UNREADABLE.values() if len(content) < 200])
def test_a_lease_object_on_storage_that_cannot_be_read_counts_as_absent(content, gcs_bucket):
    output = f"gs://{gcs_bucket.name}/out"
    gcs_bucket.blob("out/.lease").upload_from_string(content)
    with leased(Run.new(output).folder, ["x/**"], wait_s=0.0, lost=lambda: None, fence=fence):
        pass


def test_a_lease_object_on_storage_stops_no_run_by_a_path(gcs_bucket):
    gcs_bucket.blob("other/.staging-x/run.json").upload_from_string(b"{}")
    run = "x/../../other/.staging-x"
    claim = {"run": run, "patterns": ["**"], "host": "h", "pid": 1, "life": "", "since": 1.0, "renewed": 1.0}
    gcs_bucket.blob("out/.lease").upload_from_string(json.dumps({run: json.dumps(claim)}))
    with leased(Run.new(f"gs://{gcs_bucket.name}/out").folder, ["x/**"], wait_s=0.0, lost=lambda: None, fence=fence):
        pass
    assert [blob.name for blob in gcs_bucket.list_blobs()] == ["other/.staging-x/run.json"]


HOSTILE = {
    "moves what lies outside": lambda run, out: {"names": [["../secret.txt", MORE]], "gone": {}},
    "by an absolute path": lambda run, out: {"names": [[f"{out}/../secret.txt", MORE]], "gone": {}},
    "through its own folder": lambda run, out: {"names": [[f".staging-{run}/../../secret.txt", MORE]], "gone": {}},
    "through a link": lambda run, out: {"names": [[f".staging-{run}/link/secret.txt", MORE]], "gone": {}},
    "moves the rows of another run": lambda run, out: {"names": [[ROWS, MORE]], "gone": {}},
    "gives a name outside": lambda run, out: {"names": [[f".staging-{run}/rows", "../planted.jsonl"]], "gone": {}},
    "overwrites a picture": lambda run, out: {"names": [[f".staging-{run}/rows", "photo.jpg"]], "gone": {}},
    "deletes what lies outside": lambda run, out: {"names": [], "gone": {"../secret.txt": version(f"{out}/../secret.txt")}},
    "deletes a picture": lambda run, out: {"names": [], "gone": {"photo.jpg": version(f"{out}/photo.jpg")}},
}


def version(path):
    return f"{os.stat(path).st_size}-{os.stat(path).st_mtime_ns}"


@pytest.mark.parametrize("commit", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("state", ["running", "committed", "done"])
def test_a_planted_commit_moves_and_deletes_nothing_that_is_not_its_run_s(state, commit, output):
    write_file(f"{output}/photo.jpg", b"photo")
    staging = dead(output, rows=row("c"))
    os.symlink(f"{output}/../outside", f"{staging.folder}/link")
    planted = {"state": state, "settings": {"mode": "batch"}, "commit": commit(staging.name, output)}
    write_file(f"{staging.folder}/run.json", json.dumps(planted).encode())
    finish_dead(output)
    assert images_in(output) == ["a", "b"]
    assert Path(f"{output}/photo.jpg").read_bytes() == b"photo"


class Planted:
    """What runs where it is unpickled."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (self._path,)


@pytest.mark.parametrize("name", ["figures/0a", "written", "spill/0a.resume", "resumed-x/0a.resume", "run.json"])
def test_a_planted_pickle_never_runs(name, output):
    planted = pickle.dumps(Planted(f"{output}/it_ran"))
    staging = Run.new(output)
    dead(output, **{name: planted + len(planted).to_bytes(8, "big") + b"complete"})
    with staging.held({"settings": {"mode": "batch"}, "same": "command"}):
        write_file(f"{staging.folder}/{name}", planted + len(planted).to_bytes(8, "big") + b"complete")
        assert WorkerReports(staging).now() == []
        with pytest.raises(OutputError, match="expected written in"):
            read_written(staging)
        take_over_killed(staging, "command")
        assert list(resume_points_of(staging.folder)) == []
        write_file(f"{staging.folder}/run.json", b"{}")
    assert not os.path.exists(f"{output}/it_ran")


def test_a_folder_of_somebody_else_stays_however_old_it_is(output):
    for name in (".staging-photos", ".staging-0123456789ab"):
        write_file(f"{output}/{name}/a.jpg", b"photo")
    write_file(f"{output}/.staging-model/run.json", b'{"learning_rate": 0.1}')
    runs = others(output)
    for run in runs:
        os.utime(run.folder, (0, 0))
    work_there(output)
    assert {*runs} <= {*others(output)}
    assert Path(f"{output}/.staging-photos/a.jpg").read_bytes() == b"photo"


def test_a_link_to_a_folder_elsewhere_is_no_run_s(output, tmp_path):
    os.symlink(tmp_path / "outside", f"{output}/.staging-0123456789ab")
    work_there(output)


@pytest.mark.parametrize("name", ["lock", "notes.txt"])
def test_a_folder_of_spills_of_somebody_else_stays(name, output):
    write_file(f"{output}/.staging-photos/archive/{name}", b"photo")
    write_file(f"{output}/.staging-photos/archive/a.jpg", b"photo")
    Archive(output, "0a1b", window_s=60.0).recover()
    assert sorted(os.listdir(f"{output}/.staging-photos/archive")) == sorted(["a.jpg", name])


@pytest.mark.parametrize(
    "name",
    [
        "summary.json",
        "report.html",
        "samples/001-photo.jpg",
        "samples/0002-photo.jpg",
        "coco/results.json",
        "coco/images.json",
    ],
)
def test_what_a_run_would_replace_of_somebody_else_is_refused_in_one_line(name, output):
    check_reports(output, 2, coco=True)
    write_file(f"{output}/{name}", b'{"accuracy": 0.9}')
    with pytest.raises(OutputError, match=f"{name} there is not of this program and would be replaced; move it, or give another"):
        check_reports(output, 2, coco=True)
    assert name not in replaced_files(output, "run", (), {"write": {"replace": True}})


def test_a_sample_with_a_number_that_the_run_does_not_give_is_in_nobody_s_way(output):
    for name in ("samples/003-photo.jpg", "samples/mine.jpg"):
        write_file(f"{output}/{name}", b"photo")
    check_reports(output, 2)
    check_reports(output, 0)


def test_what_this_program_wrote_is_replaced(output):
    """Also where it was killed before its summary was there, which lists the samples."""
    thumbnail = cv2.imencode(".jpg", np.zeros((48, 64, 3), np.uint8))[1].tobytes()
    nothing = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.int32), np.zeros(0, np.float32), ())
    stats = JobStats()
    stats.add_detected(DetectedImage(ImageRef("a.jpg"), 64, 48, "m", "1", nothing, thumbnail=thumbnail), 3)
    facts = RunFacts(0.0, 1.0, 2.0, "command", {"write": {"coco": True}}, "batch", "model")
    JobReport(output, WriteConfig(samples=1)).finish(stats, facts, "0a1b")
    write_file(f"{output}/coco/results.json", b"[]")
    check_reports(output, 2, coco=True)
    os.remove(f"{output}/coco/results.json")
    os.remove(f"{output}/summary.json")
    check_reports(output, 2)


def test_a_folder_of_results_that_is_a_link_is_refused(output, tmp_path):
    shutil.rmtree(f"{output}/detections")
    os.symlink(tmp_path / "outside", f"{output}/detections")
    with pytest.raises(OutputError, match="expected detections to be a folder of its own, it is a link"):
        compact(output)


def test_a_planted_claim_from_the_future_keeps_nobody_out_for_ever(gcs_bucket):
    claim = {"run": "0a", "patterns": ["**"], "host": "h", "pid": 1, "life": "", "since": 1.0, "renewed": time.time() + 10_000}
    gcs_bucket.blob("out/.lease").upload_from_string(json.dumps({"0a": json.dumps(claim)}))
    with leased(Run.new(f"gs://{gcs_bucket.name}/out").folder, ["x/**"], wait_s=0.0, lost=lambda: None, fence=fence):
        pass
