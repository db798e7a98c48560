"""A launcher and its job on Flink, against a server that answers as Flink's REST API does; tests/flink has the real one."""

import contextlib
import re
from collections.abc import Container

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from pipeline.errors import OutputError, RunnerError
from pipeline.log_lines import log_lines
from pipeline.runners.cause import raise_cause
from pipeline.runners.flink import FlinkJob, check_stream
from tests.emulators import answering

JAVA = """org.apache.flink.runtime.JobException: Recovery is suppressed by FixedDelayRestartBackoffTimeStrategy
\tat org.apache.flink.runtime.executiongraph.failover.ExecutionFailureHandler.handleFailure(ExecutionFailureHandler.java:180)
Caused by: java.lang.RuntimeException: Error received from SDK harness for instruction 4: Traceback (most recent call last):
  File "sdk_worker.py", line 313, in _execute
    response = task()
google.api_core.exceptions.NotFound: 404 the subscription is gone [while running 'Pull']

\tat java.base/java.lang.Thread.run(Thread.java:840)
\t... 1 more
"""


class Flink:
    """Jobs by id, each a list of the states that it will be seen in; the last one stays."""

    def __init__(self, **jobs: list[str]):
        self.jobs = jobs
        self.names = dict.fromkeys(jobs, "detect")
        self.savepoint: dict = {"location": "file:/savepoints/1"}
        self.stacktrace = JAVA
        self.asked: list[str] = []
        self.away: Container[int] = ()  # which of the questions find no leader
        self.listed_after = 0  # so many questions

    def job(self, *, streams: bool = False) -> FlinkJob:
        """The job that comes next."""
        names, self.names = self.names, {}
        job = FlinkJob(self.master, "detect", streams=streams)
        self.names = names
        return job

    def answer(self, method: str, path: str, *_: object) -> tuple[int, object]:
        is_away = len(self.asked) in self.away
        self.asked.append(f"{method} {path}")
        if is_away:
            return 503, {}
        if path == "/jobs/overview":
            listed = self.names if len(self.asked) > self.listed_after else {}
            return 200, {"jobs": [{"jid": job, "name": name} for job, name in listed.items()]}
        _, _, job, *rest = path.split("/")
        if rest == ["stop"]:
            self.jobs[job] = ["FINISHED"]
            return 200, {"request-id": "r"}
        if rest[:1] == ["savepoints"]:
            waiting = self.asked.count(f"{method} {path}") < 3
            return 200, {"status": {"id": "IN_PROGRESS" if waiting else "COMPLETED"}, "operation": self.savepoint}
        if rest == ["exceptions"]:
            return 200, {"exceptionHistory": {"entries": [{"stacktrace": self.stacktrace}]}}
        states = self.jobs[job]
        state = states.pop(0) if len(states) > 1 else states[0]
        lost = {"errors": ["Not found.", f"Caused by: no job {path}\n\tat x"]}
        return (404, lost) if state == "LOST" else (200, {"state": state})


@pytest.fixture
def flink_of():
    with contextlib.ExitStack() as stack:

        def start(**jobs: list[str]) -> Flink:
            flink = Flink(**jobs)
            flink.master = f"127.0.0.1:{stack.enter_context(answering(flink.answer))}"
            return flink

        yield start


def test_a_flink_that_is_away_for_a_while_is_waited_for_before_and_after_it_has_the_job(flink_of, monkeypatch):
    """As where its leader changes."""
    flink = flink_of(a=["RUNNING", "RUNNING", "FINISHED"])
    flink.away = (1, 2, 5)
    job = flink.job()
    flink.names, names = {}, flink.names
    monkeypatch.setattr(job, "_missing", lambda _seconds: flink.names.update(names) or "")
    job.wait_until_finish()
    assert flink.asked == ["GET /jobs/overview"] * 5 + ["GET /jobs/a"] * 4
    flink.jobs["a"], flink.away = ["RUNNING"], range(len(flink.asked) + 1, 100)
    monkeypatch.setattr("pipeline.runners.flink._UNREACHABLE_SECONDS", 0.5)
    with pytest.raises(
        RuntimeError,
        match=r"Flink is out of reach, and the job may go on, as --attach shows: 503 .*; the same command does the rest",
    ):
        job.wait_until_finish()


def test_a_job_that_flink_never_has_is_one_line(flink_of, monkeypatch):
    monkeypatch.setattr("pipeline.runners.flink._MISSING_SECONDS", 0.0)
    with pytest.raises(RunnerError, match="Flink has no job detect within 0 s after it was submitted"):
        flink_of().job().wait_until_finish()


@pytest.mark.parametrize(
    ("state", "streams", "reason"),
    [
        ("FAILED", False, "google.api_core.exceptions.NotFound: 404 the subscription is gone .*; the same command does the rest"),
        ("CANCELED", False, "job a was cancelled; the same command does the rest"),
        # a JobManager without high availability forgets its jobs when it is started again
        ("LOST", True, "Flink has lost job a with its JobManager; --resume <state.checkpoints.dir>/a/chk-<latest> goes on .*"),
    ],
)
def test_a_job_that_does_not_end_well_fails_with_the_reason_and_how_to_go_on(state, streams, reason, flink_of):
    with pytest.raises(RuntimeError) as raised:
        flink_of(a=["RUNNING", state]).job(streams=streams).wait_until_finish()
    assert re.fullmatch(reason, str(raised.value))


@log_lines()
def test_why_a_job_restarts_is_said_once_for_each_reason(flink_of, capsys):
    flink_of(a=["RUNNING", *["RESTARTING", "RUNNING"] * 3, "FINISHED"]).job().wait_until_finish()
    assert capsys.readouterr().err.count("the job restarts: google.api_core.exceptions.NotFound: 404") == 1


def stop(flink: Flink) -> None:
    job = flink.job()
    job.stop()
    job.wait_until_finish()


@log_lines()
def test_a_job_that_is_stopped_says_where_its_savepoint_is(flink_of, capsys):
    """Its user starts the next job from there."""
    flink = flink_of(a=["RUNNING"])
    stop(flink)
    assert capsys.readouterr().err == "stopped with a savepoint; --resume file:/savepoints/1 goes on from there\n"
    assert flink.asked.count("POST /jobs/a/stop") == 1


def test_a_job_that_cannot_be_stopped_goes_on_and_says_why(flink_of):
    flink = flink_of(a=["RUNNING"])
    flink.savepoint = {"failure-cause": {"class": "x", "stack-trace": "java.io.IOException: the disk is full\n\tat y"}}
    with pytest.raises(RuntimeError, match=r"the job goes on, since Flink made no savepoint: .*IOException: the disk is full"):
        stop(flink)


def test_a_job_that_restarts_since_a_worker_lacks_something_is_ended_with_what_that_is(flink_of):
    """Flink would restart it for minutes, and say so only then."""
    flink = flink_of(a=["RUNNING", "RESTARTING"])
    lacks = "pipeline.errors.OutputError: output /out: expected a folder that launcher and workers share [while running 'List']"
    flink.stacktrace = re.sub(r"google\.api_core.*", lacks, JAVA)
    with pytest.raises(RuntimeError) as raised:
        flink.job().wait_until_finish()
    with pytest.raises(OutputError, match=r"^output /out: expected a folder that launcher and workers share$"):
        raise_cause(raised.value)
    assert flink.asked[-1] == "PATCH /jobs/a"


def test_a_job_is_found_by_its_name_among_those_that_are_new(flink_of):
    flink = flink_of(old=["FAILED"], new=["FINISHED"])
    flink.names = {"old": "detect"}
    job = FlinkJob(flink.master, "detect")
    flink.names["new"] = "detect"
    job.wait_until_finish()


def test_a_job_that_flink_does_not_list_yet_is_cancelled_once_it_does(flink_of):
    """The job server has taken it, and submits it: it would run on, unseen."""
    flink = flink_of(a=["RUNNING"])
    flink.listed_after = 4
    flink.away = (2,)
    flink.job().cancel()
    assert flink.asked == ["GET /jobs/overview"] * 5 + ["PATCH /jobs/a"]


def test_a_stream_on_flink_keeps_its_checkpoints_and_restarts_without_limit():
    """Whatever the cluster's configuration says."""
    given = PipelineOptions(["--flink_master=localhost:1", "--checkpointing_interval=9", "--execution_retry_delay=5"])
    check_stream(given)
    sent = given.get_all_options()
    assert (sent["number_of_execution_retries"], sent["execution_retry_delay"]) == (2**31 - 1, 5), "the user's delay"
    assert sent["externalized_checkpoints_enabled"] and sent["retain_externalized_checkpoints_on_cancellation"]
