"""Beam's in-memory runner in threads: flat, two bundles of a stream side by side, and signals that harm no step."""

import _thread
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apache_beam as beam
import psutil
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from pipeline.launch.signals import stopped_by_signals
from pipeline.limits import Share
from pipeline.process import PROCESS
from pipeline.runners.in_memory import InMemoryRunner
from tests.conftest import REPO
from tests.processes import wait_until

both, one_is_done, heard, endless_is_done = threading.Barrier(2), threading.Event(), threading.Event(), threading.Event()


def meet(_element: int) -> None:
    """Waits until another is in a bundle, too."""
    both.wait(timeout=60)


def fail_in_one(_element: int) -> None:
    """Fails in one of the two bundles; the other hangs."""
    if both.wait(timeout=60) == 0:
        raise ZeroDivisionError("in one of them")
    one_is_done.wait(timeout=60)


def signal_own_thread(_element: int) -> None:
    """Has a signal delivered to its own thread, as the system may do with one that is for the process."""
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    if not heard.wait(timeout=60):
        raise TimeoutError("the main thread has not heard of it")


def started(work: Callable[[int], None], *flags: str) -> Any:
    """A job that has begun, if it is a stream, or that has ended."""
    pipeline = beam.Pipeline(runner=InMemoryRunner(), options=PipelineOptions([*flags]))
    _ = pipeline | "Begin" >> beam.Create([0], reshuffle=False) | "Work" >> beam.Map(work)
    return pipeline.run()


AS_MANY_AS_CORES = """
import os, sys
import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from pipeline.runners import in_memory
from tests.runners.test_in_memory import leave_a_file

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
options = PipelineOptions(["--direct_running_mode=multi_processing", "--direct_num_workers=0"])
with beam.Pipeline(runner=in_memory.InMemoryRunner(), options=options) as pipeline:
    _ = pipeline | "Begin" >> beam.Create([*range(8)]) | "Leave" >> beam.Map(leave_a_file, sys.argv[1], os.getpid())
"""


def leave_a_file(_element: int, folder: str, launcher: int) -> None:
    """Notes the processes that the launcher has started, and how many divide the host."""
    workers = [each for each in psutil.Process(launcher).children() if "sdk_worker_main" in " ".join(each.cmdline())]
    Path(folder, str(os.getpid())).write_text(f"{len(workers)} {Share.of_environment().of}")


def test_as_many_processes_as_cores_are_as_many_as_divide_them(tmp_path):
    """In a container of one core of two, two processes took all of it each."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("a machine of one core")
    subprocess.run([sys.executable, "-c", AS_MANY_AS_CORES, str(tmp_path)], cwd=REPO, check=True)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"1 1"}


def test_a_stream_has_two_bundles_side_by_side_and_ends_with_both():
    """Each of the two waits for the other."""
    running = started(meet, "--streaming")
    assert running.wait_until_finish() == running.state == "DONE"


def test_a_bundle_that_fails_ends_the_stream_at_once():
    """Without waiting for the other bundle."""
    running = started(fail_in_one, "--streaming")
    with pytest.raises(ZeroDivisionError, match="in one of them"):
        running.wait_until_finish()
    assert running.state == "FAILED"
    one_is_done.set()


def test_a_signal_is_heard_whichever_thread_it_comes_to():
    """Python's handlers run in the main thread, which nothing wakes for it; a job once heard no SIGTERM for a minute."""
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.set())
    try:
        assert started(signal_own_thread, "--streaming").wait_until_finish() == "DONE"
    finally:
        signal.signal(signal.SIGUSR1, before)


def stop_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: PROCESS.stopped)


class SignalledCondition(threading.Condition):
    """SIGTERM comes when its lock has just been taken."""

    def __enter__(self) -> bool:
        taken = super().__enter__()
        stop_by_signal()
        return taken


condition = SignalledCondition()


def work_until_stopped(_element: int) -> None:
    try:
        while True:
            PROCESS.check_stopped()
    finally:
        endless_is_done.set()


def take_condition_and_work(element: int) -> None:
    with condition:
        pass
    work_until_stopped(element)


def run_until_stopped(work: Callable[[int], None]) -> None:
    """Runs a batch job that a signal stops; its thread ends, too."""
    endless_is_done.clear()
    with stopped_by_signals(), pytest.raises(KeyboardInterrupt):
        started(work)
    assert endless_is_done.is_set()


def test_a_signal_interrupts_no_step_of_a_batch_job_and_ends_it_at_the_next_element():
    """A KeyboardInterrupt in `Condition.__enter__` once left the lock locked, and the job hung at its end."""
    run_until_stopped(take_condition_and_work)
    assert condition.acquire(blocking=False)


def test_a_signal_while_the_thread_of_a_batch_job_starts_ends_the_thread(monkeypatch):
    """Else it would go on writing while the launcher removes what the run has written."""

    def start_signalled(*arguments: Any) -> None:
        monkeypatch.setattr(_thread, "start_new_thread", start)  # the handler of the signal starts one, too
        start(*arguments)
        stop_by_signal()

    start = _thread.start_new_thread
    monkeypatch.setattr(_thread, "start_new_thread", start_signalled)
    run_until_stopped(work_until_stopped)
