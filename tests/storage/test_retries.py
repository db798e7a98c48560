"""Calls of a store that does not answer: how long they are tried again, and when not at all."""

import threading
import time

import pytest

from pipeline import process
from pipeline.process import PROCESS
from pipeline.storage.store import StoreError, retried
from tests.clock import Clock


class Hanging:
    """A call that ends without an answer after a minute, as one of S3 does."""

    def __init__(self, clock):
        self.clock, self.calls = clock, 0

    def __call__(self):
        self.calls += 1
        self.clock.now += 60.0
        raise StoreError("no answer", transient=True)


@pytest.fixture
def hanging(monkeypatch):
    clock = Clock()

    def sleep(seconds):
        clock.now += seconds

    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "sleep", sleep)
    return Hanging(clock)


@pytest.mark.parametrize(("seconds", "calls"), [(0, 1), (60, 1), (120, 2), (200, 4)])
def test_the_time_of_all_tries_counts(hanging, seconds, calls):
    """Two minutes are two calls of a minute each; each began its own two minutes, and took three."""
    with pytest.raises(StoreError, match="no answer"):
        retried(hanging, seconds)()
    assert hanging.calls == calls


def test_after_a_stop_nothing_is_tried_again(hanging, monkeypatch):
    """The end of a stopped job would else wait for minutes for each file of its clean-up."""
    monkeypatch.setattr(PROCESS, "stopped", True)
    with pytest.raises(StoreError, match="no answer"):
        retried(hanging)()
    assert hanging.calls == 1


def test_the_clean_up_of_a_stopped_job_does_not_wait_for_storage_that_hangs(monkeypatch):
    """What it leaves goes later: the lock after five minutes, unfinished files after a day."""
    monkeypatch.setattr(process, "_CLEAN_UP_SECONDS", 0.01)
    answers = threading.Event()
    monkeypatch.setattr(PROCESS, "stopped", True)
    PROCESS.clean_up(answers.wait)
    answers.set()
    monkeypatch.setattr(PROCESS, "stopped", False)
    ran_in = []
    PROCESS.clean_up(lambda: ran_in.append(threading.current_thread()))
    assert ran_in == [threading.current_thread()]
