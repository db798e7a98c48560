"""Locks: one process at a time does what a lock names; a lost lock costs work, never a row."""

import contextlib
import logging
import os
import threading
import time

import pytest

from pipeline.errors import BusyError
from pipeline.log_lines import log_lines
from pipeline.results import lock
from pipeline.results.lock import locked
from pipeline.results.run_folder import Run
from pipeline.storage.files import exists
from pipeline.storage.listing import files_of
from pipeline.storage.stores import generation_of
from tests.processes import in_thread, wait_until


@pytest.mark.slow
@log_lines()
def test_one_holds_a_lock_and_others_are_told_who_or_wait(tmp_path, capsys, monkeypatch):
    check_one_holds(f"{tmp_path}/out", capsys, monkeypatch)


@log_lines()
def test_one_holds_a_lock_on_object_storage(bucket, capsys, monkeypatch):
    check_one_holds(f"{bucket}/out", capsys, monkeypatch)
    assert [*files_of(f"{bucket}/out")] == []


def check_one_holds(output, capsys, monkeypatch):
    monkeypatch.setattr(lock, "_POLL_SECONDS", 0.1)
    entered = threading.Event()

    def wait():
        with locked(output, "a", wait_s=60.0):
            entered.set()

    with contextlib.ExitStack() as waiting, locked(output, "a", what="run 0a1b"), locked(output, "b"):  # another command
        with pytest.raises(BusyError, match=rf"run 0a1b, process {os.getpid()} on "), locked(output, "a"):
            pass
        waiting.enter_context(in_thread(wait))
        wait_until(lambda: "waiting: output" in capsys.readouterr().err)
        assert not entered.is_set()
    assert entered.is_set()
    with locked(output, "a"):
        pass


@pytest.mark.parametrize(
    ("ages_s", "is_busy"),
    [
        pytest.param({}, False, id="a run that ends with its process"),
        pytest.param({"submitted": 600}, True, id="a job that waits for machines"),
        pytest.param({"submitted": 4000}, False, id="a job that never got any"),
        pytest.param({"submitted": 4000, "figures/a": 300, "figures/b": 30}, True, id="workers that report"),
        pytest.param({"submitted": 200, "figures/a": 150}, False, id="workers that are gone"),
        pytest.param({"submitted": 10, "figures/a": 5, "../runs/0a1b/outcome.json": 1}, False, id="a run that has ended"),
    ],
)
def test_a_lock_whose_launcher_was_killed_is_held_as_long_as_workers_of_its_run_report(ages_s, is_busy, tmp_path):
    """What a killed process leaves of a lock is its file."""
    (tmp_path / ".lock-a").write_text("run 0a1b, process 1 on a machine, since 2026-11-21 02:00:00.000000 UTC")
    for name, age_s in ages_s.items():
        path = tmp_path / ".staging-0a1b" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    busy = pytest.raises(BusyError, match=r"\(run 0a1b, process 1 on") if is_busy else contextlib.nullcontext()
    with busy, locked(str(tmp_path), "a", what="run ffff"):
        pass
    assert (tmp_path / ".lock-a").exists() == is_busy


def test_a_launcher_that_leaves_its_job_leaves_the_lock(tmp_path):
    run = Run(str(tmp_path), "0a1b")
    with locked(run.output, "a", what="run 0a1b"):
        run.open(outlives=True)
    with pytest.raises(BusyError), locked(run.output, "a"):
        pass
    run.remove()
    with locked(run.output, "a"):
        pass


def test_on_object_storage_a_paused_holder_loses_its_lock_and_harms_nobody_when_it_wakes(bucket, caplog, monkeypatch):
    """It learns that by its next heartbeat; it neither writes over the lock of the new holder, who keeps it, nor deletes it."""
    caplog.set_level(logging.WARNING, "pipeline.results.lock")  # whatever earlier tests of this process set
    output, path = f"{bucket}/out", f"{bucket}/out/.lock-a"
    for name, seconds in {"_BEAT_SECONDS": 5.0, "_EXPIRES_SECONDS": 1.0, "_POLL_SECONDS": 0.2}.items():
        monkeypatch.setattr(lock, name, seconds)
    with contextlib.ExitStack() as held:
        held.enter_context(locked(output, "a", what="the first"))
        monkeypatch.setattr(lock, "_BEAT_SECONDS", 0.2)
        held.enter_context(locked(output, "a", wait_s=60.0, what="the second"))
        monkeypatch.setattr(lock, "_EXPIRES_SECONDS", 300.0)  # a busy machine may delay a heartbeat
        wait_until(lambda: "another process has taken this lock" in caplog.text)
        taken = generation_of(path)
        wait_until(lambda: generation_of(path) != taken)
        with pytest.raises(BusyError, match="the second"), locked(output, "a"):
            pass
    assert not exists(path)


def test_a_planted_lock_file_is_described_as_far_as_it_can_be_and_followed_nowhere(tmp_path):
    (tmp_path / "victim").write_text("precious")
    os.symlink(tmp_path / "victim", tmp_path / ".lock-a")
    with locked(str(tmp_path), "a"):
        pass
    assert (tmp_path / "victim").read_text() == "precious"
