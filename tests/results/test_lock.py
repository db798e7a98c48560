"""Locks: one process at a time does what a lock names; a lost lock costs work, never a row."""

import contextlib
import logging
import os
import threading

import pytest

from pipeline.errors import BusyError
from pipeline.log_lines import log_lines
from pipeline.results import lock
from pipeline.results.lock import locked
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
