"""What workers tell their launcher: each of them the latest that it has counted, and nothing once the run is over."""

import dataclasses
import shutil
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.process import ProcessState
from pipeline.results.run_folder import Run
from pipeline.stats import worker_reports
from pipeline.stats.canary_stats import CanaryStats
from pipeline.stats.counted import Counted
from pipeline.stats.job_stats import JobStats
from pipeline.stats.worker_reports import StatsReporter, WorkerReports
from pipeline.storage.files import read_checked
from pipeline.storage.listing import MAX_PARALLEL
from tests.clock import Clock


@pytest.fixture
def process(monkeypatch):
    """The state of a worker process of its own."""
    process = ProcessState()
    monkeypatch.setattr(worker_reports, "PROCESS", process)
    return process


@pytest.fixture
def staging(tmp_path, process):
    """A run that has begun."""
    run = Run(f"{tmp_path}/out", "0a1b")
    with run.opened():
        yield run


def test_of_a_stream_only_images_with_an_outcome_count_as_read(staging):
    """The rest comes again, and so does that of a worker that was killed before its report."""
    stats = JobStats(read=9, skipped=1, dead=Counter({("read", "not_found"): 2}))
    StatsReporter(staging, stats.copy).flush()
    assert (WorkerReports(staging, streaming=True).now().read, WorkerReports(staging).now().read) == (3, 9)


def test_what_was_seen_a_moment_ago_is_not_looked_up_again(staging):
    """A bar is drawn five times a second, and on object storage each look costs."""
    seen, stats = WorkerReports(staging), JobStats(read=1)
    reporter = StatsReporter(staging, stats.copy)
    reporter.flush()
    assert seen.now() == JobStats(read=1)
    stats.read = 2
    reporter.flush()
    assert seen.now() == JobStats(read=1)
    assert WorkerReports(staging).now() == JobStats(read=2)


def test_reports_of_many_workers_are_read_side_by_side(staging, monkeypatch):
    """One after the other, those of hundreds of workers are old before the last one is read."""
    together = threading.Barrier(MAX_PARALLEL)

    def read(path, parse):
        together.wait(60)
        return read_checked(path, parse)

    for _ in range(MAX_PARALLEL):
        StatsReporter(staging, JobStats(read=1).copy).flush()
    monkeypatch.setattr(worker_reports, "read_checked", read)
    assert WorkerReports(staging).now().read == MAX_PARALLEL


def test_a_worker_that_was_lost_while_messages_waited_leaves_no_age_of_the_backlog(staging, monkeypatch):
    """Its last report stays, so the launcher would show the age for ever, and an alert would go on."""
    monkeypatch.setattr(worker_reports, "REPORT_SECONDS", 0.0)
    clock = Clock()
    monkeypatch.setattr(worker_reports, "time", SimpleNamespace(monotonic=clock))
    seen, lost, other = WorkerReports(staging), JobStats(read=1, backlog_age_ms=9e5), JobStats(read=1, backlog_age_ms=2e3)
    StatsReporter(staging, lost.copy).flush()
    reporter = StatsReporter(staging, other.copy)
    for seconds, age_ms in ((0.0, 9e5), (15.0, 9e5), (15.0, 2e3)):
        clock.now += seconds
        other.read += 1
        reporter.flush()
        assert seen.now().backlog_age_ms == age_ms
    assert seen.now().read == 1 + other.read


def of_model(images):
    return JobStats(batch_sizes=(1, 2), canary=CanaryStats("8", "7", images=images), model_notes=("a note",))


def report(staging, images=None):
    """Writes the report of a worker whose canary has received so many images; of one that has no model yet."""
    counted = Counted()
    counted.model_stats = lambda: of_model(images) if images else JobStats()
    counted.model_events = Counter(swaps=1)
    StatsReporter(staging, lambda: counted.stats_of(JobStats())).flush()


def test_the_launcher_adds_up_what_workers_say_of_the_model_and_of_what_they_wait_for(staging, process):
    assert (WorkerReports(staging).now(), process.waiting_for) == (JobStats(), "waiting for workers")
    report(staging)
    assert (WorkerReports(staging).now().batch_sizes, process.waiting_for) == ((), "1 worker is loading the model")
    report(staging, 3)
    report(staging, 4)
    assert WorkerReports(staging).now() == dataclasses.replace(of_model(7), model_events={"swaps": 3})


def test_nothing_comes_back_of_a_run_that_is_over(staging):
    """A worker may outlive its job, and tell the last of it when the folder is gone."""
    WorkerReports(staging)
    stats = JobStats(read=1)
    reporter = StatsReporter(staging, stats.copy)
    reporter.flush()
    shutil.rmtree(staging.folder)
    stats.read = 2
    reporter.flush()
    assert not Path(staging.folder).exists()
