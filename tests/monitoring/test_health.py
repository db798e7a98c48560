"""The health checks that an orchestrator requests: 200 or 503, and one line for each check."""

import pytest

from pipeline.feed import read_image
from pipeline.monitoring import health
from pipeline.process import PARTS, PROCESS
from pipeline.stats.job_stats import JobStats
from pipeline.stream.threads import RunThreads
from tests.processes import wait_until

WARM = JobStats(batch_sizes=(1, 2))

READY = ["ok model: warm", "ok Pub/Sub: answers", "ok storage: answers", "ok archive: answers"]


def live(stuck_after_s=60.0):
    return answered(health.liveness(stuck_after_s))


def answered(checks):
    """Status and lines."""
    answer = health.answer(checks)
    return answer.status, answer.content.decode().splitlines()


def test_a_job_that_works_is_live_and_ready_with_a_line_for_each_check():
    status, lines = live()
    assert (status, [line.split(":")[0] for line in lines]) == (200, [f"ok {name}" for name in ("threads", *PARTS)])
    assert answered(health.readiness(WARM)) == (200, READY)


@pytest.mark.parametrize("name", ["model", "Pub/Sub", "storage", "archive"])
def test_while_the_model_loads_or_a_service_fails_a_job_is_live_but_not_ready(monkeypatch, name):
    monkeypatch.setattr(PROCESS, "waiting_for", "loading the model")
    monkeypatch.setattr(PROCESS, "failing", {name})
    status, lines = answered(health.readiness(JobStats() if name == "model" else WARM))
    why = "loading the model" if name == "model" else "the last call failed, as the log shows"
    assert (status, [line for line in lines if line not in READY]) == (503, [f"FAILED {name}: {why}"])
    assert live()[0] == 200


def test_whoever_reaches_the_port_learns_no_address_of_an_image(caplog):
    """The log has the error."""
    threads = RunThreads()
    read_image.note_storage("no answer from https://host/photos/anna.jpg?sig=hunter2")
    threads.start("pulling", lambda: open("/photos/anna.jpg").close())
    try:
        wait_until(lambda: live()[0] == 503)
        lines = [*live()[1], *answered(health.readiness(WARM))[1]]
        assert "FAILED storage: the last call failed, as the log shows" in lines and "anna" not in "".join(lines)
        assert caplog.text.count("anna.jpg") == 2
    finally:
        threads.close()


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
    threads = RunThreads()
    threads.start("pulling", lambda: 1 // 0)
    wait_until(lambda: live()[0] == 503)
    assert "FAILED threads: pulling failed, as the log shows" in live()[1]
    threads.close()
    assert live()[0] == 200
