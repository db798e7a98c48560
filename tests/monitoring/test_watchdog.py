"""A part is stuck when it has work and makes no progress; a job that waits by design, loads a model or is idle is not."""

import itertools
import threading
import types

import pytest

from pipeline.config import DetectConfig
from pipeline.detect.batcher import Batcher
from pipeline.detect.detector import Detector
from pipeline.detect.loaded_model import LoadedModel, ModelInUse
from pipeline.monitoring import watchdog
from pipeline.monitoring.watchdog import Watchdog
from pipeline.process import PARTS, PROCESS, Part
from tests.detect.test_engines import HW, NumPyEngine, image, load_toy
from tests.processes import in_thread, wait_until

LIMIT = 60.0


class Watched:
    """Parts that a watchdog watches, and the stuck ones that it found."""

    def __init__(self, limit=LIMIT):
        self.parts = {name: Part() for name in PARTS}
        self.stuck: list[str] = []
        self.watchdog = Watchdog(limit, lambda name, _part: self.stuck.append(name), self.parts)

    def pass_(self, seconds, *moving):
        """Lets time pass, in which some parts move."""
        for _ in range(int(seconds)):
            for name in moving:
                self.parts[name].progressed()
            self.watchdog.look(1.0)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_with_work_that_does_not_move_is_stuck_after_the_time(name):
    """An idle time before does not count."""
    watched = Watched()
    watched.pass_(10 * LIMIT)
    watched.parts[name].begin()
    watched.pass_(LIMIT - 1)
    assert (watched.stuck, watched.parts[name].stalled_s) == ([], LIMIT - 1)
    watched.pass_(1)
    assert watched.stuck == [name]


@pytest.mark.parametrize(
    ("waiting", "moving", "stuck"),
    [
        pytest.param([], [], [], id="idle"),
        pytest.param(["subscriber"], ["read"], [], id="messages wait while storage is tried again"),
        pytest.param(["subscriber", "detector"], ["detector"], [], id="messages wait for a slow detector"),
        pytest.param(["subscriber", "publish"], ["publish"], [], id="messages wait for Pub/Sub, which is tried again"),
        pytest.param(["subscriber", "read", "detector"], [], ["detector"], id="the last part of those that wait"),
        pytest.param(["subscriber", "read"], ["publish"], ["read"], id="a read that does not return"),
        pytest.param(["detector", "publish"], ["publish"], ["detector"], id="what is published does not move a detector"),
        pytest.param(["archive", "detector"], ["detector"], ["archive"], id="windows that are never closed"),
        pytest.param(["pull"], ["publish"], ["pull"], id="a pull that does not return"),
    ],
)
def test_what_waits_and_does_not_move_is_stuck_and_the_part_at_fault_is_named(waiting, moving, stuck):
    watched = Watched()
    for name in waiting:
        watched.parts[name].begin()
    watched.pass_(LIMIT, *moving)
    assert watched.stuck == stuck
    assert stuck or all(part.stalled_s == 0 for part in watched.parts.values())


def test_without_a_limit_stalls_are_measured_and_nothing_ends():
    watched = Watched(limit=0.0)
    watched.parts["detector"].begin()
    watched.pass_(1000)
    assert (watched.stuck, watched.parts["detector"].stalled_s) == ([], 1000)


def test_a_process_that_was_stopped_for_an_hour_is_not_stuck(monkeypatch):
    """By SIGSTOP, or with its machine: the time in which it could not run does not count."""
    clock, looks = itertools.count(step=3600), itertools.count()
    monkeypatch.setattr(watchdog, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    watched = Watched()
    watched.parts["detector"].begin()
    watched.watchdog.run(types.SimpleNamespace(wait=lambda _seconds: next(looks) == 10))
    assert (watched.stuck, watched.parts["detector"].stalled_s) == ([], 10 * 2 * watched.watchdog.every_s)


class Broken(NumPyEngine):
    def run(self, pixels):
        raise OSError("the device is gone")


def test_a_detector_that_fails_has_no_work_left():
    """What is counted as waiting for ever would end a job that is idle."""
    toy, before = load_toy(DetectConfig()), PROCESS.parts["detector"].waiting
    detector = Detector(LoadedModel(toy.metadata, toy.version, Batcher(Broken(), HW)), DetectConfig())
    started = [detector.start([image(str(number))]) for number in range(20)]
    assert {str(each.exception()) for each in started} == {"the device is gone"}
    wait_until(lambda: PROCESS.parts["detector"].waiting == before)
    detector.close()


@pytest.mark.slow
def test_a_model_that_loads_while_images_wait_for_it_is_progress():
    """A GPU may have room for one version only; the next one loads while images wait, as long as that takes."""
    in_use, taken = ModelInUse(load_toy(DetectConfig())), threading.Event()
    in_use.unload()

    def take():
        with in_use.taken():
            taken.set()

    before = PROCESS.parts["detector"].steps
    with in_thread(take):
        wait_until(lambda: PROCESS.parts["detector"].steps >= before + 2)
        assert not taken.is_set()
        in_use.swap(load_toy(DetectConfig()))
    assert taken.is_set()
