"""Attempts at committing the same run, one after the other, at once, and too late: what stands in the folder is one's, and stays.

A runner that lost a worker begins a step again elsewhere, and the lost one may go on later, in the middle of what it did. So each
moment is tried at which an attempt asks the disk or Cloud Storage for a change.
"""

import errno
import fcntl
import json
import os
import signal
import stat

import pytest
import requests

from pipeline.results.layout import StagedFile
from pipeline.results.run import Run
from pipeline.storage.files import delete_files, list_files, read_file, write_file
from tests.results.test_run import CHANGES as ON_DISK
from tests.results.test_run import REQUEST, before_change

NAMES = [
    "detections/detections-00000-of-00002.jsonl",
    "detections/detections-00001-of-00002.jsonl",
    "index/detections-00000-of-00002.parquet",
]
EARLIER = ["detections/detections-00000-of-00001.jsonl", "report.html", "samples/001-a.jpg"]
CHANGES = (*ON_DISK, REQUEST)
REPLACE, ONLY_NEW = {"write": {"replace": True}}, {"only_new": True}


@pytest.fixture(params=["disk", "disk without locks"])
def output(request, tmp_path, monkeypatch):
    if "without" in request.param:
        flock = fcntl.flock

        def refuse(file, how):
            if stat.S_ISDIR(os.fstat(file if isinstance(file, int) else file.fileno()).st_mode):
                raise OSError(errno.ENOLCK, "no locks for folders")
            flock(file, how)

        monkeypatch.setattr(fcntl, "flock", refuse)
    return f"{tmp_path}/out"


@pytest.fixture
def on_storage(strict_gcs_bucket, monkeypatch):
    """A results folder on the strict emulator, where copies and removals happen on their conditions as well, as writes do.

    It takes the generation of which an object is to be copied or removed for such a condition. In a bucket that keeps no earlier
    versions both say the same.
    """
    ask = requests.Session.request

    def with_generation(session, method, url, **kwargs):
        if method == "DELETE":
            url = url.replace("ifGenerationMatch=", "generation=")
        return ask(session, method, url.replace("ifSourceGenerationMatch=", "sourceGeneration="), **kwargs)

    monkeypatch.setattr(requests.Session, "request", with_generation)
    return f"gs://{strict_gcs_bucket.name}/out"


def disturbed(number, do, how, meanwhile=lambda: None, changes=CHANGES):
    """Does something in a process that gets a signal before its `number`-th change; False where that does not come.

    Where the signal stops it, it goes on after `meanwhile`.
    """
    child = os.fork()
    if child == 0:
        before_change(number, lambda: os.kill(os.getpid(), how), changes)
        try:
            do()
        finally:
            os._exit(0)
    status = os.waitpid(child, os.WUNTRACED)[1]
    if not os.WIFSTOPPED(status):
        return os.waitstatus_to_exitcode(status) == -how
    try:
        meanwhile()
    finally:
        os.kill(child, signal.SIGCONT)
        os.waitpid(child, 0)
    return True


def staged(staging, names, content):
    for name in names:
        write_file(f"{staging.folder}/attempt/{name}", content)
    return [StagedFile(f"{staging.folder}/attempt/{name}", name) for name in names]


def write_earlier(output, run, content):
    """What a run leaves."""
    for name in EARLIER:
        write_file(f"{output}/{name}", content)
    summary = {"images": {}, "config": {"write": {"coco": True}}, "mode": "batch", "run": run, "samples": ["samples/001-a.jpg"]}
    write_file(f"{output}/summary.json", json.dumps(summary).encode())


def visible(output):
    paths = {path: path[len(output) + 1 :] for path in list_files(f"{output}/**")}
    return {name: read_file(path) for path, name in paths.items() if not name.startswith(".")}


def begun(output, settings=REPLACE):
    """A run with all of its files staged, in a folder that holds an earlier one: its staging folder, and they."""
    write_earlier(output, "before", b"earlier")
    staging = Run.new(output)
    write_file(f"{staging.folder}/run.json", json.dumps({"state": "running", "settings": settings}).encode())
    return staging, staged(staging, NAMES, b"new")


def test_who_comes_after_one_that_died_between_any_two_changes_finishes_it(output):
    number = 0
    while True:
        number += 1
        staging, files = begun(output)
        killed = disturbed(number, lambda: staging.commit(files), signal.SIGKILL)  # noqa: B023
        staging.commit(files)
        assert visible(output) == dict.fromkeys(NAMES, b"new"), number
        staging.commit(files)
        assert staging.finish()
        assert visible(output) == dict.fromkeys(NAMES, b"new"), number
        staging.remove()
        if not killed:
            break
    assert number > 5


def test_on_storage_too_who_comes_after_one_that_died_finishes_it(gcs_bucket):
    test_who_comes_after_one_that_died_between_any_two_changes_finishes_it(f"gs://{gcs_bucket.name}/out")


def test_who_comes_too_late_changes_nothing_of_what_others_have_committed_since(output):
    """It was paused before any of its changes; meanwhile another attempt, and then another run, came to their ends.

    A disk with locks has all others wait for it. One without cannot remove a file on a condition: between its look at that file
    and the removal it must not be paused.
    """
    if not _without_locks(output):
        pytest.skip("a disk with locks")
    assert_late(output, REPLACE, [change for change in CHANGES if change != "os.remove"])


@pytest.mark.parametrize("settings", [REPLACE, ONLY_NEW], ids=["replaces", "adds"])
def test_on_storage_too_who_comes_too_late_changes_nothing(on_storage, settings):
    """Cloud Storage can remove, and copy, on a condition: so there is no moment at which a pause does harm."""
    assert_late(on_storage, settings)


def test_who_begins_when_others_have_committed_takes_nothing_of_what_they_write_then(on_storage):
    """As the launcher's report, which comes before its summary, which says whose it is."""
    number = 0
    while True:
        number += 1
        staging, files = begun(on_storage)
        staging.commit(files)
        write_file(f"{on_storage}/report.html", b"of the new")

        def others():
            write_file(f"{on_storage}/summary.json", json.dumps({"run": staging.name}).encode())  # noqa: B023
            staging.remove()  # noqa: B023

        paused = disturbed(number, lambda: staging.commit(files), signal.SIGSTOP, others)  # noqa: B023
        assert {"report.html", *NAMES} <= {*visible(on_storage)}, number
        staging.remove()
        if not paused:
            break


def assert_late(output, settings, changes=CHANGES):
    """That an attempt which is paused before any of its changes leaves things as others have left them."""
    number = 0
    while True:
        number += 1
        staging, files = begun(output, settings)
        found = {}

        def others():
            staging.commit(files)  # noqa: B023
            write_earlier(output, staging.name, b"summary of the new")  # noqa: B023
            staging.remove()  # noqa: B023
            after = Run.new(output)
            with after.held({"settings": settings}):
                after.commit(staged(after, [EARLIER[0], *NAMES], b"later"))
                write_earlier(output, after.name, b"later")
            found.update(visible(output))  # noqa: B023

        paused = disturbed(number, lambda: staging.commit(files), signal.SIGSTOP, others, changes)  # noqa: B023
        if not paused:
            break
        at_the_top = [name for name in found if not name.startswith("runs/")]
        assert sorted(at_the_top) == sorted([*EARLIER, *NAMES, "summary.json"])
        assert visible(output) == found, number
        staging.remove()
        delete_files([f"{output}/{name}" for name in found])
    assert number > 5


def _without_locks(folder):
    os.makedirs(folder, exist_ok=True)
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
    except OSError:
        return True
    finally:
        os.close(place)
    return False


def test_of_two_attempts_with_files_of_their_own_the_first_decides(output):
    """As when a job begins again from its start while a worker of before goes on: never some of one and some of the other."""
    number = 0
    other = ["detections/detections-00000-of-00001.jsonl", "index/detections-00000-of-00001.parquet"]
    while True:
        number += 1
        staging, files = begun(output)
        again = [StagedFile(file.staged.replace("/attempt/", "/again/"), file.final) for file in staged(staging, other, b"again")]
        for file, written in zip(again, staged(staging, other, b"again"), strict=True):
            write_file(file.staged, read_file(written.staged))
        killed = disturbed(number, lambda: staging.commit(files), signal.SIGKILL)  # noqa: B023
        staging.commit(again)
        assert visible(output) in (dict.fromkeys(NAMES, b"new"), dict.fromkeys(other, b"again")), number
        staging.remove()
        if not killed:
            break
    assert visible(output) == dict.fromkeys(NAMES, b"new")


def test_a_job_of_a_template_that_died_between_any_two_changes_is_finished_by_who_comes_after_it(output):
    number = 0
    while True:
        number += 1
        staging, files = begun(output)
        staging.commit(files, unlaunched={"settings": REPLACE})
        next_files = [StagedFile(file.staged.replace("/attempt/", "/next/"), file.final) for file in files]
        for file in next_files:
            write_file(file.staged, b"next")
        killed = disturbed(number, lambda: staging.commit(next_files, unlaunched={"settings": REPLACE}), signal.SIGKILL)  # noqa: B023
        staging.commit(next_files, unlaunched={"settings": REPLACE})
        assert visible(output) == dict.fromkeys(NAMES, b"next"), number
        staging.remove()
        if not killed:
            break
    assert number > 5


def test_jobs_of_one_template_share_a_folder_and_each_commits_its_files(output):
    staging, files = begun(output)
    staging.commit(files, unlaunched={"settings": REPLACE})
    staging.commit(files, unlaunched={"settings": REPLACE})  # the same one again
    assert visible(output) == dict.fromkeys(NAMES, b"new")
    next_files = [StagedFile(file.staged.replace("/attempt/", "/next/"), file.final) for file in files]
    for file in next_files:
        write_file(file.staged, b"next")
    staging.commit(next_files, unlaunched={"settings": REPLACE})
    assert visible(output) == dict.fromkeys(NAMES, b"next")
    assert staging.output == output
