"""What an orchestrator asks: 200 or 503, and one line for each check."""

import threading

import pytest

from pipeline.monitoring import health
from pipeline.stats.job_stats import JobStats
from pipeline.stats.process import PARTS, PROCESS
from pipeline.stream.threads import RunThreads
from tests.processes import wait_until

WARM = JobStats(batch_sizes=(1, 2))


def live(stuck_after_s=60.0):
    return answered(health.liveness(stuck_after_s))


def ready(stats):
    return answered(health.readiness(stats))


def answered(checks):
    """Status and lines."""
    answer = health.answer(checks)
    return answer.status, answer.content.decode().splitlines()


def test_a_job_that_works_is_live_and_ready_with_a_line_for_each_check():
    status, lines = live()
    assert status == 200
    assert [line.split(":")[0] for line in lines] == [f"ok {name}" for name in ("threads", *PARTS)]
    status, lines = ready(WARM)
    assert (status, lines) == (200, ["ok model: warm", "ok Pub/Sub: answers", "ok storage: answers", "ok archive: answers"])


def test_before_the_model_is_warm_a_job_is_live_but_not_ready(monkeypatch):
    monkeypatch.setattr(PROCESS, "waiting_for", "loading the model")
    status, lines = ready(JobStats())
    assert (status, lines[0]) == (503, "FAILED model: loading the model")
    assert live()[0] == 200


@pytest.mark.parametrize("name", ["Pub/Sub", "storage", "archive"])
def test_while_a_service_fails_a_job_is_live_but_not_ready(monkeypatch, name):
    monkeypatch.setitem(PROCESS.failing, name, "503\nof the service")
    status, lines = ready(WARM)
    assert (status, f"FAILED {name}: 503 of the service" in lines) == (503, True)
    assert live()[0] == 200


@pytest.mark.parametrize(
    ("limit", "stalled_s", "status"), [(60.0, 59.0, 200), (60.0, 60.0, 503), (0.0, 599.0, 200), (0.0, 600.0, 503)]
)
def test_a_job_with_a_stuck_part_is_not_live(monkeypatch, limit, stalled_s, status):
    """Without the watchdog the orchestrator is told after ten minutes."""
    monkeypatch.setattr(PROCESS.parts["read"], "stalled_s", stalled_s)
    found, lines = live(limit)
    assert found == status
    assert f"{'ok' if status == 200 else 'FAILED'} read: 0 waiting, {stalled_s:.0f} s without progress" in lines


def test_a_job_with_a_dead_thread_is_not_live_until_its_run_is_over():
    threads, gone = RunThreads(), threading.Event()

    def die():
        gone.set()
        raise ValueError("broken")

    threads.start("pulling", die)
    wait_until(lambda: gone.is_set() and live()[0] == 503)
    assert "FAILED threads: pulling: ValueError: broken" in live()[1]
    threads.close()
    assert live()[0] == 200
