"""Files get their names all together: what stands in a results folder is one run's, whenever a run is killed or does it twice."""

import glob
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest

from pipeline.errors import OutputError
from pipeline.results.layout import StagedFile
from pipeline.results.lease import leased
from pipeline.results.other_runs import (
    committed_states,
    finish_dead,
    others,
    remove_dead,
    runs_at_work,
)
from pipeline.results.run import Run, fence
from pipeline.storage.files import write_file
from tests.results.silence import fall_silent

OLD = [
    *(f"detections/detections-0000{n}-of-00003.{ending}" for n in range(3) for ending in ("jsonl", "parquet")),
    "dead_letters/dead_letters-00000-of-00001.jsonl",
    "coco/results.json",
    "coco/images.json",
]
NEW = [
    *(f"detections/detections-0000{n}-of-00002.jsonl" for n in range(2)),
    "dead_letters/dead_letters-00000-of-00001.jsonl",
    *(f"index/detections-0000{n}-of-00002.parquet" for n in range(2)),
]
BESIDE = ["summary.json", "report.html", "samples/001-a.jpg"]
STRANGERS = ["detections/mine.jsonl", "samples/mine.jpg", "samples/002-mine.jpg", "notes.txt"]
CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")  # what the system can be asked to do to a disk
REQUEST = "http.client.send"
_CHANGING = (b"POST ", b"PUT ", b"PATCH ", b"DELETE ")


@pytest.fixture
def output(tmp_path):
    """A results folder with an earlier run in it, and files of somebody else."""
    for name in [*OLD, *BESIDE, *STRANGERS]:
        write_file(f"{tmp_path}/out/{name}", b"old")
    write_summary(f"{tmp_path}/out", "before")
    return f"{tmp_path}/out"


def write_summary(output, run):
    samples = ["samples/001-a.jpg", "../../etc/passwd", "notes.txt", "samples/mine.jpg"]  # it may have been changed by hand
    summary = {"images": {}, "config": {"write": {"coco": True}}, "mode": "batch", "run": run, "samples": samples}
    write_file(f"{output}/summary.json", json.dumps(summary).encode())


def staged(staging, names=NEW):
    for name in names:
        write_file(f"{staging.folder}/0123456789abcdef0123456789abcdef/{name}", b"new")
    return [StagedFile(f"{staging.folder}/0123456789abcdef0123456789abcdef/{name}", name) for name in names]


def visible(output):
    """All files with their content, without what readers leave out."""
    paths = [path for path in Path(output).rglob("*") if path.is_file()]
    names = {str(path.relative_to(output)): path for path in paths}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(".")}


def assert_committed(output):
    assert visible(output) == {**dict.fromkeys(NEW, b"new"), **dict.fromkeys(STRANGERS, b"old")}


def dies_at(number, do):
    """Does something in a process of its own, which is killed before its `number`-th change to the disk: whether it was."""
    child = os.fork()
    if child == 0:
        before_change(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        try:
            do()
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def before_change(number, act, changes=CHANGES, thread=None):
    """Calls `act` before this process, or one thread of it, asks for its `number`-th change.

    Args:
      changes: The audit events that count: an `open` for writing, a `REQUEST` that changes Cloud Storage, all others.
    """
    left = [number]

    def is_change(event, args):
        if event == "open":
            return "w" in str(args[1])
        return event != REQUEST or bytes(args[1][:8]).startswith(_CHANGING)

    def count(event, args):
        if event in changes and thread in (None, threading.get_ident()) and is_change(event, args):
            left[0] -= 1
            if not left[0]:
                act()

    sys.addaudithook(count)


def test_what_an_earlier_run_left_goes_and_what_others_put_there_stays(output):
    staging = Run.new(output)
    with staging.held({}):
        staging.commit(staged(staging))
        assert_committed(output)
        write_summary(output, staging.name)
    assert not glob.glob(f"{output}/.*")


def test_what_a_run_says_of_itself_stays_until_its_summary_does(output):
    staging = Run.new(output)
    with pytest.raises(ZeroDivisionError), staging.held({"settings": {"mode": "1"}}):
        staging.commit(staged(staging))
        raise ZeroDivisionError
    assert_committed(output)
    assert [state["settings"] for state in committed_states(output)] == [{"mode": "1"}]
    assert list(runs_at_work(output).values()) == []


def test_to_commit_twice_is_to_commit_once(output):
    staging = Run.new(output)
    with staging.held({}):
        files = staged(staging)
        staging.commit(files)
        staging.commit(files)
        assert_committed(output)
        assert staging.stop()
        assert_committed(output)


def test_two_workers_may_commit_at_the_same_time(output):
    for _ in range(20):
        staging, errors, start = Run.new(output), [], threading.Barrier(4)
        with staging.held({}):
            files = staged(staging)

            def work(files=files, staging=staging, errors=errors, start=start):
                start.wait()
                try:
                    staging.commit(files)
                except BaseException as err:  # noqa: BLE001
                    errors.append(err)

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert errors == []
            assert_committed(output)


def test_a_run_killed_at_any_moment_of_a_commit_is_finished_by_the_next_or_never_was(output, tmp_path):
    committed, number, before = [], 0, visible(output)
    while True:
        number += 1
        copy = f"{tmp_path}/{number}"
        shutil.copytree(output, copy)
        staging = Run.new(copy)

        def work(staging=staging):
            with staging.held({"settings": {"mode": "1"}}):
                staging.commit(staged(staging))
                os._exit(0)  # it dies here at the latest: nothing of it is tidied up

        killed = dies_at(number, work)
        found = visible(copy)
        indexes = [name for name, content in found.items() if name.startswith("index/") and content == b"new"]
        rows = [f"detections/{Path(name).stem}.jsonl" for name in indexes]
        assert {name: found.get(name) for name in rows} == dict.fromkeys(rows, b"new"), "an index came before its rows"
        if missing := [name for name in before if name not in found]:
            assert {name: found.get(name) for name in NEW} == dict.fromkeys(NEW, b"new"), f"{missing} went too early"
        finish_dead(copy)
        if visible(copy) != before:
            committed.append(number)
            assert_committed(copy)
            assert [state["settings"] for state in committed_states(copy)] == [{"mode": "1"}]
        if os.path.exists(staging.folder):
            os.utime(staging.folder, (0, 0))  # killed before it had its lock: see below
        remove_dead(copy)
        assert not [name for name in os.listdir(copy) if name.startswith(".") and os.path.isdir(f"{copy}/{name}")]
        if not killed:
            break
    assert committed == list(range(committed[0], number + 1)), "from one moment on the results are complete"
    assert number - committed[0] > 10


@pytest.mark.parametrize("content", [b"", b"[]"])
def test_a_run_killed_in_a_commit_whose_state_is_lost_is_repaired_by_its_command(content, output, tmp_path, capsys):
    """Its rows may be there in part, and nobody knows which of its files belong there; one line says what to do."""
    number, parts = 0, set()
    while True:
        number += 1
        copy = f"{tmp_path}/{number}"
        shutil.copytree(output, copy)
        run = Run.new(copy)

        def work(run=run):
            with run.held({}):
                run.commit(staged(run))
                os._exit(0)

        killed = dies_at(number, work)
        if run.state().get("state") == "committed":
            parts.add(sum(visible(copy).get(name) == b"new" for name in NEW))
            Path(run.folder, "run.json").write_bytes(content)
            capsys.readouterr()
            finish_dead(copy)
            (said,) = capsys.readouterr().err.splitlines()
            assert f"{run.name}/run.json cannot be read" in said and "its command repairs the results when it runs again" in said
            again = Run.new(copy)
            with again.held({}):
                again.commit(staged(again))
                remove_dead(copy, but=again)
                assert_committed(copy)
                write_summary(copy, again.name)
            assert not [name for name in os.listdir(copy) if name.startswith(".")]
        if not killed:
            break
    assert parts == {*range(len(NEW) + 1)}


def test_a_run_that_was_stopped_does_not_commit(output):
    staging, before = Run.new(output), visible(output)
    with staging.held({}):
        files = staged(staging)
        assert not staging.stop()
        with pytest.raises(OutputError, match="was stopped before its results were complete"):
            staging.commit(files)
    assert visible(output) == before
    with pytest.raises(OutputError, match="was stopped"):  # a worker that nobody stops any more, long after the run
        staging.commit(files)
    assert visible(output) == before
    finish_dead(output)
    assert visible(output) == before


def test_one_that_stops_a_run_and_one_that_commits_it_always_agree(output):
    for _ in range(50):
        staging, start, said = Run.new(output), threading.Barrier(2), []
        with staging.held({}):
            files = staged(staging)

            def work(files=files, staging=staging, start=start, said=said):
                start.wait()
                try:
                    staging.commit(files)
                    said.append(True)
                except OutputError:
                    said.append(False)

            thread = threading.Thread(target=work)
            thread.start()
            start.wait()
            committed = staging.stop()
            thread.join()
            assert committed or not said[0]
            left = [name for name, _ in files if os.path.exists(name)]
            assert left == ([] if committed else [name for name, _ in files])


def test_a_staging_folder_that_somebody_tidied_up_is_one_clear_error_and_stops_no_other_run(output):
    staging, before = Run.new(output), visible(output)
    with pytest.raises(FileNotFoundError, match="was the staging folder removed"), staging.held({}):
        staging.commit(
            [StagedFile(f"{staging.folder}/0123456789abcdef0123456789abcdef/gone", "detections/detections-00007-of-00008.jsonl")],
        )
    assert visible(output) == before

    def die():
        with staging.held({}):
            names = [[f".staging-{staging.name}/a", "detections/detections-00007-of-00008.jsonl"]]
            state = {"state": "committed", "settings": {}, "commit": {"names": names, "gone": {}}}
            write_file(f"{staging.folder}/run.json", json.dumps(state).encode())
            os._exit(0)

    dies_at(1000, die)
    assert others(output) == [staging]
    finish_dead(output)
    assert others(output) == []
    assert visible(output) == before


class TestWhoIsAlive:
    def test_the_folder_of_a_run_at_work_stays_and_that_of_a_dead_one_goes(self, tmp_path):
        output = f"{tmp_path}/out[1]*"
        one, other = Run.new(output), Run.new(output)
        with one.held({"settings": {"mode": "1"}}):
            assert dies_at(1000, lambda: other.held({"settings": {"mode": "2"}}).__enter__()) is False
            assert list(runs_at_work(output).values()) == [{"state": "running", "settings": {"mode": "1"}}]
            remove_dead(output)
            assert os.listdir(output) == [os.path.basename(one.folder)]
        assert os.listdir(output) == []

    def test_a_folder_without_a_lock_is_dead_only_once_it_is_old(self, tmp_path):
        folder = tmp_path / ".staging-0123456789ab"
        folder.mkdir()
        remove_dead(str(tmp_path))
        assert folder.exists()
        os.utime(folder, (0, 0))
        remove_dead(str(tmp_path))
        assert not folder.exists()

    def test_on_object_storage_a_run_is_alive_while_it_renews_its_record(self, gcs_bucket):
        output = f"gs://{gcs_bucket.name}/out[1]"
        one, two = Run.new(output), Run.new(output)
        with one.held({"settings": {"mode": "1"}}), two.held({"settings": {"mode": "2"}}):
            assert sorted(about["settings"]["mode"] for about in runs_at_work(output).values()) == ["1", "2"]
            remove_dead(output, but=one)
            assert others(output) == sorted([one, two])
            fall_silent(output)
            remove_dead(output, but=one)
            assert others(output) == [one]
        assert list(gcs_bucket.list_blobs()) == []

    @pytest.mark.parametrize("ended", ["killed", "taken over"])
    def test_on_object_storage_a_run_with_a_lease_is_alive_while_it_has_that(self, ended, gcs_bucket):
        """So one that was killed here is known to be dead at once, and not five minutes later."""
        output = f"gs://{gcs_bucket.name}/out"
        staging, about = Run.new(output), {"settings": {"mode": "batch"}}

        def lease():
            return leased(staging.folder, ["x/**"], wait_s=0.0, lost=lambda: None, fence=fence)

        def work():
            with lease(), staging.held(about):
                os._exit(0)

        if ended == "killed":
            dies_at(1000, work)
        else:
            with lease(), staging.held(about):
                assert runs_at_work(output) == {staging.name: {"state": "running", **about}}
                remove_dead(output)
                assert others(output) == [staging]
                gcs_bucket.blob("out/.lease").delete()
                assert runs_at_work(output) == {}
                write_file(f"{staging.folder}/more", b"")  # it does not know yet
        assert runs_at_work(output) == {}
        remove_dead(output)
        assert others(output) == []

    def test_on_object_storage_files_get_their_names_too(self, gcs_bucket):
        output = f"gs://{gcs_bucket.name}/out"
        for name in [*OLD, *STRANGERS]:
            write_file(f"{output}/{name}", b"old")
        write_summary(output, "before")
        staging = Run.new(output)
        with staging.held({}):
            files = staged(staging)
            staging.commit(files)
            staging.commit(files)
        staging.remove()
        assert {blob.name: blob.download_as_bytes() for blob in gcs_bucket.list_blobs()} == {
            **{f"out/{name}": b"new" for name in NEW},
            **{f"out/{name}": b"old" for name in STRANGERS},
        }


def test_a_job_without_a_launcher_begins_when_it_commits(output):
    staging = Run.new(output)
    files = staged(staging)
    with pytest.raises(OutputError, match="was stopped"):
        staging.commit(files)
    staging.commit(files, unlaunched={"settings": {"mode": "1"}})
    assert_committed(output)
    assert staging.state()["settings"] == {"mode": "1"}


def test_nothing_to_finish_is_no_error(tmp_path):
    finish_dead(str(tmp_path))
    remove_dead(f"{tmp_path}/absent")
    staging = Run.new(str(tmp_path))
    with staging.held({}):
        assert staging.finish() is False
