"""Beam's in-memory runner as streams have it: flat, two bundles side by side, and what fails one of them fails the job."""

import gc
import signal
import threading
import tracemalloc
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.metrics import monitoring_infos
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner, fn_runner
from apache_beam.runners.worker.statesampler import StateSampler

from pipeline.launch.in_memory import InMemoryRunner
from pipeline.stream.pubsub import _Endless

KEPT: list[int] = []
both, one_is_done, heard = threading.Barrier(2), threading.Event(), threading.Event()


class DelayedAcks(beam.DoFn):
    """Comes again as often as its element says, each time in a bundle of its own; notes halfway and at the end what is in use."""

    @beam.DoFn.unbounded_per_element()
    def process(self, turns: int, tracker: Any = beam.DoFn.RestrictionParam(_Endless())):  # noqa: B008
        turn = tracker.current_restriction()
        tracker.try_claim(turn)
        yield turn
        if turn in (turns // 2, turns):
            gc.collect()
            KEPT.append(tracemalloc.get_traced_memory()[0])
        if turn < turns:
            tracker.defer_remainder()


@pytest.fixture
def growth_a_turn(monkeypatch):
    """Tells how many bytes a turn leaves behind."""
    monkeypatch.setattr(StateSampler.__init__, "__defaults__", (1,))  # Beam waits for that thread at the end of each bundle

    def measure(runner: FnApiRunner, turns: int) -> float:
        KEPT.clear()
        tracemalloc.start()
        try:
            with beam.Pipeline(runner=runner) as pipeline:
                begin = pipeline | "Begin" >> beam.Create([turns], reshuffle=False)
                _ = begin | "DelayedAcks" >> beam.ParDo(DelayedAcks()).with_output_types(int)
        finally:
            tracemalloc.stop()
        halfway, end = KEPT
        return (end - halfway) / (turns - turns // 2)

    return measure


def test_a_turn_leaves_nothing_behind(growth_a_turn):
    """But its bundle's name: Beam remembers the last thousand. What a turn keeps, each of three jobs shows; what other threads
    of this process allocate meanwhile, one of them may not.
    """
    assert any(growth_a_turn(InMemoryRunner(), turns=400) < 400 for _ in range(3))


def test_beam_itself_keeps_the_metrics_of_each_turn(growth_a_turn, monkeypatch):
    """Where this fails Beam has mended it, and `add_up_metrics_at_once` may go."""
    monkeypatch.setattr(fn_runner, "consolidate_monitoring_infos", monitoring_infos.consolidate)
    assert growth_a_turn(FnApiRunner(), turns=400) > 1000


class Meet(beam.DoFn):
    """Waits until another is in a bundle, too."""

    def process(self, element: int) -> None:
        both.wait(timeout=60)


class FailInOne(beam.DoFn):
    """Fails in one of the two bundles; the other hangs."""

    def process(self, element: int) -> None:
        if both.wait(timeout=60) == 0:
            raise ZeroDivisionError("in one of them")
        one_is_done.wait(timeout=60)


class Signalled(beam.DoFn):
    """Has a signal delivered to its own thread, as the system may do with one that is for the process."""

    def process(self, element: int) -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        if not heard.wait(timeout=20):
            raise TimeoutError("the main thread has not heard of it")


def stream_of(work: beam.DoFn) -> Any:
    """A stream that has begun."""
    pipeline = beam.Pipeline(runner=InMemoryRunner(), options=PipelineOptions(["--streaming"]))
    _ = pipeline | "Begin" >> beam.Create([0], reshuffle=False) | "Work" >> beam.ParDo(work)
    return pipeline.run()


def test_a_stream_has_two_bundles_side_by_side_and_ends_with_both():
    running = stream_of(Meet())
    assert running.wait_until_finish() == running.state == "DONE"


def test_a_bundle_that_fails_ends_the_stream_at_once():
    running = stream_of(FailInOne())
    with pytest.raises(ZeroDivisionError, match="in one of them"):
        running.wait_until_finish()
    assert running.state == "FAILED"
    one_is_done.set()


def test_a_signal_is_heard_whichever_thread_it_comes_to():
    """Python's handlers run in the main thread, which nothing wakes for it; a job once heard no SIGTERM for a minute."""
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.set())
    try:
        assert stream_of(Signalled()).wait_until_finish() == "DONE"
    finally:
        signal.signal(signal.SIGUSR1, before)
