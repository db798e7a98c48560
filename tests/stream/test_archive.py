"""The archive of a stream: durable bundle by bundle, a file a window, and nothing kept in memory."""

import collections
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pipeline.results.lease import if_dead
from pipeline.results.ledger import list_files_of_rows, read_entries
from pipeline.results.other_runs import finish_dead, remove_dead

from pipeline.records import ImageRef
from pipeline.results.completion import Provenance
from pipeline.results.run import Run
from pipeline.stream.archive import Archive, ArchivedRow
from tests.clock import Clock
from tests.conftest import REPO
from tests.results.silence import fall_silent
from tests.results.test_lease import process

START = 1795226400.0  # 2026-11-21T02:00:00Z


@pytest.fixture
def clock():
    return Clock(START)


def row(name, kind="detections"):
    return ArchivedRow(kind, ImageRef(f"gs://b/{name}"), json.dumps({"image": {"uri": f"gs://b/{name}"}}).encode())


def files(folder: Path) -> dict[str, list[str]]:
    """The names of the images in each file of the archive."""
    return {
        str(path.relative_to(folder)): [json.loads(line)["image"]["uri"].removeprefix("gs://b/") for line in path.open()]
        for path in sorted(folder.glob("[!.]*/*.jsonl"))
    }


def spills(folder: Path) -> list[str]:
    return [path.name for path in folder.glob(".staging-*/archive/*.rows")]


def test_a_window_becomes_a_file_when_it_is_over(tmp_path, clock):
    archive = Archive(str(tmp_path), "run", window_s=60.0, clock=clock)
    archive.spill([row("c"), row("a")])
    archive.spill([row("b"), row("x", "dead_letters")])
    archive.close_windows()
    assert files(tmp_path) == {}
    clock.now += 60.0
    archive.spill([row("d")])
    archive.close_windows()
    closed = {
        "dead_letters/dead_letters-20261121T020000Z-run-00000-of-00001.jsonl": ["x"],
        "detections/detections-20261121T020000Z-run-00000-of-00001.jsonl": ["a", "b", "c"],
    }
    assert files(tmp_path) == closed
    archive.finish()
    assert files(tmp_path) == {**closed, "detections/detections-20261121T020100Z-run-00000-of-00001.jsonl": ["d"]}
    assert sorted(os.listdir(tmp_path)) == ["dead_letters", "detections"]


def test_a_row_is_durable_when_its_bundle_ends(tmp_path, clock):
    archive = Archive(str(tmp_path), "run", window_s=60.0, clock=clock)
    archive.spill([row("a")])
    (spill,) = tmp_path.glob(".staging-run/archive/*.rows")
    assert spill.read_bytes() == row("a").row + b"\n"


def test_nothing_is_written_for_a_bundle_without_rows(tmp_path, clock):
    archive = Archive(str(tmp_path), "run", window_s=60.0, clock=clock)
    archive.spill([])
    archive.finish()
    assert os.listdir(tmp_path) == []


def test_an_image_has_its_shard(tmp_path, clock):
    archive = Archive(str(tmp_path), "run", window_s=60.0, shards=3, clock=clock)
    archive.spill([row(str(n)) for n in range(100)])
    archive.finish()
    found = files(tmp_path)
    assert list(found) == [f"detections/detections-20261121T020000Z-run-{n:05d}-of-00003.jsonl" for n in range(3)]
    assert sorted(itertools.chain(*found.values())) == sorted(str(n) for n in range(100))


def test_a_clock_that_steps_back_opens_no_window_again(tmp_path, clock):
    archive = Archive(str(tmp_path), "run", window_s=60.0, clock=clock)
    archive.spill([row("a")])
    clock.now += 60.0
    archive.close_windows()
    clock.now -= 120.0
    archive.spill([row("b")])
    archive.close_windows()
    clock.now += 240.0
    archive.close_windows()
    assert list(files(tmp_path).values()) == [["a"], ["b"]]


@pytest.mark.parametrize("jump_s", [7200.0, -7200.0], ids=["forward", "back"])
@pytest.mark.parametrize("stays_s", [1.0, 3600.0], ids=["a second", "an hour"])
def test_a_clock_that_jumps_holds_up_no_file(tmp_path, clock, jump_s, stays_s):
    """Two hours away and back again: files go on at the pace of the windows, and each row is in one of them."""
    passed, number = Clock(), 0
    archive = Archive(str(tmp_path), "run", window_s=60.0, clock=clock, monotonic=passed)

    def work(seconds):
        """A row each ten seconds; the greatest number of rows that are in no file yet."""
        nonlocal number
        waiting = 0
        for _ in range(int(seconds // 10) + 1):
            archive.spill([row(f"{number:05d}")])
            number += 1
            archive.close_windows()
            waiting = max(waiting, number - sum(map(len, files(tmp_path).values())))
            clock.now += 10.0
            passed.now += 10.0
        return waiting

    usual = work(300.0)
    clock.now += jump_s
    while_away = work(stays_s)
    clock.now -= jump_s
    afterwards = work(300.0)
    assert usual <= 6 and max(while_away, afterwards) <= 13, "at most what two windows hold"
    archive.finish()
    assert sorted(itertools.chain(*files(tmp_path).values())) == [f"{n:05d}" for n in range(number)]


def test_on_object_storage_a_clock_that_jumps_forward_makes_no_run_dead(gcs_bucket, clock):
    folder, passed = f"gs://{gcs_bucket.name}/archive", Clock()
    alive = Archive(folder, "alive", window_s=60.0, clock=clock, monotonic=passed)
    jumping = Archive(folder, "jumping", window_s=60.0, clock=clock, monotonic=passed)
    alive.spill([row("a")])
    clock.now += 7200.0
    jumping.recover()
    assert [blob.name for blob in gcs_bucket.list_blobs(prefix="archive/detections")] == []
    for archive in (alive, jumping):
        archive.finish()


KILLED = """
import os, signal, sys
from tests.stream.test_archive import Archive, START, row
archive = Archive(sys.argv[1], "killed", window_s=60.0, clock=lambda: START)
archive.spill([row("a"), row("b")])
archive.spill([row("c", "dead_letters")])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_what_a_killed_run_left_is_finished_by_the_next(tmp_path, clock):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=REPO, check=False)
    assert done.returncode == -signal.SIGKILL
    archive = Archive(str(tmp_path), "next", window_s=60.0, clock=clock)
    archive.recover()
    archive.finish()
    assert files(tmp_path) == {
        "dead_letters/dead_letters-20261121T020000Z-killed-00000-of-00001.jsonl": ["c"],
        "detections/detections-20261121T020000Z-killed-00000-of-00001.jsonl": ["a", "b"],
    }
    assert sorted(os.listdir(tmp_path)) == ["dead_letters", "detections"]


STREAM = """
import os, signal, sys
from pipeline.results.run import Run
from tests.stream.test_archive import Archive, START, row
with Run(sys.argv[1], "0a1b2c3d").held({"settings": {"mode": "streaming"}}):
    archive = Archive(sys.argv[1], "0a1b2c3d", window_s=60.0, clock=lambda: START)
    archive.spill([row("a")])
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ZeroDivisionError
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "failed"])
def test_no_other_run_removes_rows_of_a_dead_stream_that_are_in_no_file_yet(how, tmp_path, clock):
    """Their messages are acknowledged. A backfill in the same folder removes what dead runs leave, but not these rows."""
    output = str(tmp_path)
    subprocess.run([sys.executable, "-c", STREAM, output, how], cwd=REPO, check=False, stderr=subprocess.DEVNULL)
    finish_dead(output)
    remove_dead(output)
    assert len(spills(tmp_path)) == 1
    archive = Archive(output, "next", window_s=60.0, clock=clock)
    archive.recover()
    archive.finish()
    remove_dead(output)
    assert files(tmp_path) == {"detections/detections-20261121T020000Z-0a1b2c3d-00000-of-00001.jsonl": ["a"]}
    assert os.listdir(tmp_path) == ["detections"]


def test_the_archive_shows_its_run_as_alive_by_the_one_lock_that_the_run_has(tmp_path, clock):
    run = Run(str(tmp_path), "0a1b2c3d")
    with run.held({"settings": {"mode": "streaming"}}):
        archive = Archive(run.output, run.name, window_s=60.0, clock=clock)
        archive.spill([row("a")])
        archive.finish()
        with if_dead(run.folder) as dead:
            assert not dead
    assert os.listdir(tmp_path) == ["detections"]


@pytest.mark.parametrize(
    ("model", "known"),
    [(("yolov4", "3"), True), (("a/ñ model's name", "1"), True), (("x" * 300, "1"), False), (("", ""), False)],
    ids=["short", "any characters", "longer than a file's name", "none"],
)
@pytest.mark.parametrize("where", ["local", "storage"])
def test_with_which_model_a_killed_run_had_failed_stands_in_the_index(where, model, known, tmp_path, clock, request):
    """A backfill need not do again what failed for good; where it is not known, it does."""
    folder = str(tmp_path) if where == "local" else f"gs://{request.getfixturevalue('gcs_bucket').name}/archive"
    provenance = Provenance("0a", "0b", *model)
    killed = Archive(folder, "killed", window_s=60.0, clock=clock, provenance=provenance)
    killed.spill([row("a"), row("b", "dead_letters")])
    killed._alive.close()  # a process that is killed lets go of its lock
    clock.now += 3600.0
    another = Archive(folder, "next", window_s=60.0, clock=clock, provenance=Provenance("0c", "0d", "another", "4"))
    another.recover()
    another.finish()
    entries = [entry for file in list_files_of_rows(folder) for entry in read_entries(file)]
    assert [(entry.uri, entry.settings) for entry in entries] == [("gs://b/a", "0a"), ("gs://b/b", "0b")]
    assert (entries[1].model, entries[1].version) == (model if known else ("", ""))


def test_a_run_that_lives_is_left_alone(tmp_path, clock):
    first = Archive(str(tmp_path), "first", window_s=60.0, clock=clock)
    first.spill([row("a")])
    clock.now += 3600.0
    second = Archive(str(tmp_path), "second", window_s=60.0, clock=clock)
    second.recover()
    assert files(tmp_path) == {}
    first.finish()
    second.finish()
    assert list(files(tmp_path).values()) == [["a"]]


def test_on_object_storage_the_spills_of_a_run_whose_lease_has_expired_are_nobodys(gcs_bucket, clock):
    folder = f"gs://{gcs_bucket.name}/archive"
    first = Archive(folder, "first", window_s=60.0, clock=clock)
    first.spill([row("a")])
    second = Archive(folder, "second", window_s=60.0, clock=clock)
    clock.now += 3600.0
    second.recover()
    assert [blob.name for blob in gcs_bucket.list_blobs(prefix="archive/detections")] == []
    fall_silent(folder)
    second.recover()
    second.finish()
    (blob,) = gcs_bucket.list_blobs(prefix="archive/detections")
    assert blob.name == "archive/detections/detections-20261121T020000Z-first-00000-of-00001.jsonl"
    assert blob.download_as_bytes() == row("a").row + b"\n"
    first.finish()
    assert [each.name for each in gcs_bucket.list_blobs()] == [blob.name]


def test_on_object_storage_what_a_killed_run_left_is_finished_at_once(gcs_bucket, clock):
    folder = f"gs://{gcs_bucket.name}/archive"

    def work(say, hear):
        Archive(folder, "killed", window_s=60.0, clock=clock).spill([row("a")])
        say("spilled")
        hear()

    with process(work) as (pid, _, hear):
        assert hear() == "spilled"
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        archive = Archive(folder, "next", window_s=60.0, clock=clock)
        archive.recover()
        archive.finish()
    names = [blob.name for blob in gcs_bucket.list_blobs()]
    assert names == ["archive/detections/detections-20261121T020000Z-killed-00000-of-00001.jsonl"]


def test_a_run_that_was_killed_before_its_spills_went_leaves_no_row_twice(tmp_path, clock):
    archive = Archive(str(tmp_path), "run", window_s=60.0, clock=clock)
    archive.spill([row("a"), row("b")])
    left = {path: path.read_bytes() for path in tmp_path.glob(".staging-run/archive/*.rows")}
    clock.now += 60.0
    archive.close_windows()
    for path, content in left.items():
        path.write_bytes(content)
    archive.spill([row("c")])
    archive.finish()
    assert sorted(itertools.chain(*files(tmp_path).values())) == ["a", "b", "c"]
    assert spills(tmp_path) == []


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["spill", "wait", "back", "close", "restart"]), max_size=25))
def test_each_row_is_in_the_archive_once_whatever_happens(tmp_path_factory, steps):
    folder, clock, number = tmp_path_factory.mktemp("archive"), Clock(), 0
    runs = [Archive(str(folder), "run0", window_s=60.0, clock=clock)]
    for step in steps:
        if step == "spill":
            runs[-1].spill([row(number), row(number + 1)])
            number += 2
        elif step == "wait":
            clock.now += 45.0
        elif step == "back":
            clock.now -= 100.0
        elif step == "close":
            runs[-1].close_windows()
        else:  # a killed process lets go of its lock
            runs[-1]._alive.close()
            runs.append(Archive(str(folder), f"run{len(runs)}", window_s=60.0, clock=clock))
            runs[-1].recover()
    runs[-1].finish()
    rows = collections.Counter(name for names in files(folder).values() for name in names)
    assert rows == collections.Counter(str(n) for n in range(number))
    assert spills(folder) == []
