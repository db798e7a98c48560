"""A launcher and its job on Flink, against a server that answers as Flink's REST API does; tests/flink has the real one."""

import http.server
import json
import re
import threading

import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.flink_runner import FlinkJarJobServer
from apache_beam.utils.subprocess_server import JavaJarServer

from pipeline.errors import OutputError
from pipeline.launch import flink_options
from pipeline.launch.finalize import failed
from pipeline.launch.flink import Cluster, FlinkJob, _reason, master_of

JAVA = """org.apache.flink.runtime.JobException: Recovery is suppressed by FixedDelayRestartBackoffTimeStrategy
\tat org.apache.flink.runtime.executiongraph.failover.ExecutionFailureHandler.handleFailure(ExecutionFailureHandler.java:180)
Caused by: java.lang.RuntimeException: Error received from SDK harness for instruction 4: Traceback (most recent call last):
  File "sdk_worker.py", line 313, in _execute
    response = task()
google.api_core.exceptions.NotFound: 404 the subscription is gone [while running 'Pull']

\tat java.base/java.lang.Thread.run(Thread.java:840)
\t... 1 more
"""


class Flink(http.server.ThreadingHTTPServer):
    """Jobs by id, each a list of the states that it will be seen in; the last one stays."""

    def __init__(self, **jobs: list[str]):
        super().__init__(("127.0.0.1", 0), RequestAggregator)
        self.jobs = {job: [*states] for job, states in jobs.items()}
        self.names = dict.fromkeys(jobs, "detect")
        self.savepoint: dict = {"location": "file:/savepoints/1"}
        self.stacktrace = JAVA
        self.checkpoint = ""
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def cluster(self) -> Cluster:
        return Cluster(f"127.0.0.1:{self.server_port}")

    def answer(self, method: str, path: str) -> object:
        self.asked.append(f"{method} {path}")
        if path == "/jobs/overview":
            return {"jobs": [{"jid": job, "name": name} for job, name in self.names.items()]}
        _, _, job, *rest = path.split("/")
        if job not in self.jobs:
            return None
        if rest == ["stop"]:
            self.jobs[job] = ["FINISHED"]
            return {"request-id": "r"}
        if rest[:1] == ["savepoints"]:
            waiting = self.asked.count(f"{method} {path}") < 3
            return {"status": {"id": "IN_PROGRESS" if waiting else "COMPLETED"}, "operation": self.savepoint}
        if rest == ["checkpoints"]:
            return {"latest": {"completed": {"external_path": self.checkpoint} if self.checkpoint else None, "restored": None}}
        if rest == ["exceptions"]:
            return {"exceptionHistory": {"entries": [{"stacktrace": self.stacktrace}]}}
        states = self.jobs[job]
        state = states.pop(0) if len(states) > 1 else states[0]
        return None if state == "LOST" else {"state": state}


class RequestAggregator(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = self.server.answer(self.command, self.path)
        body = json.dumps(answer if answer is not None else {"errors": ["Not found.", f"Caused by: no job {self.path}\n\tat x"]})
        self.send_response(200 if answer is not None else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    do_POST = do_PATCH = do_GET

    def log_message(self, *_arguments: object) -> None:
        """Says nothing."""


@pytest.fixture
def flink_of(request):
    def make(**jobs: list[str]) -> Flink:
        server = Flink(**jobs)
        request.addfinalizer(server.shutdown)
        return server

    return make


def test_a_job_is_waited_for_until_it_is_done(flink_of):
    FlinkJob(flink_of(a=["INITIALIZING", "RUNNING", "RESTARTING", "RUNNING", "FINISHED"]).cluster, "detect").wait()


@pytest.mark.parametrize(
    ("state", "reason"), [("FAILED", "NotFound: 404 the subscription is gone"), ("CANCELED", "a was cancelled")]
)
def test_a_job_that_does_not_end_well_fails_with_the_reason(state, reason, flink_of):
    with pytest.raises(RuntimeError, match=reason):
        FlinkJob(flink_of(a=["RUNNING", state]).cluster, "detect").wait()


def test_a_job_that_flink_has_lost_is_one_line_that_says_how_to_go_on(flink_of):
    """A JobManager without high availability forgets its jobs when it is started again."""
    flink = flink_of(a=["RUNNING", "RUNNING", "LOST"])
    flink.checkpoint = "file:/checkpoints/a/chk-7"
    with pytest.raises(RuntimeError) as raised:
        FlinkJob(flink.cluster, "detect").wait()
    assert str(raised.value) == (
        "Flink has lost job a with its JobManager; --resume file:/checkpoints/a/chk-7 (or a later checkpoint beside it) goes on "
        "from there"
    )


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        (
            "file:/c/chk-7",
            "the job's first checkpoint is file:/c/chk-7; later ones replace it\n"
            "--resume file:/c/chk-7 (or a later checkpoint beside it) goes on from there\n",
        ),
        ("<checkpoint-not-externally-addressable>", ""),
        ("", ""),
    ],
    ids=["on disk", "in memory", "none"],
)
@pytest.mark.parametrize("end", ["FAILED", "CANCELED"])
def test_a_job_that_ends_leaves_a_checkpoint_to_go_on_from(end, checkpoint, said, flink_of, capsys):
    flink = flink_of(a=["RUNNING", end])
    flink.checkpoint = checkpoint
    with pytest.raises(RuntimeError):
        FlinkJob(flink.cluster, "detect").wait()
    assert capsys.readouterr().err == said


def test_why_a_job_restarts_is_said_once_for_each_reason(flink_of, capsys):
    FlinkJob(flink_of(a=["RUNNING", *["RESTARTING", "RUNNING"] * 3, "FINISHED"]).cluster, "detect").wait()
    assert capsys.readouterr().err.count("the job restarts: google.api_core.exceptions.NotFound: 404") == 1


def test_a_job_that_is_stopped_says_where_its_savepoint_is(flink_of, capsys):
    """Its user starts the next job from there."""
    flink = flink_of(a=["RUNNING"])
    job = FlinkJob(flink.cluster, "detect")
    job.stop()
    job.wait()
    assert capsys.readouterr().err == "stopped with a savepoint; --resume file:/savepoints/1 goes on from there\n"
    assert flink.asked.count("POST /jobs/a/stop") == 1


def test_a_job_that_cannot_be_stopped_goes_on_and_says_why(flink_of):
    flink = flink_of(a=["RUNNING"])
    flink.savepoint = {"failure-cause": {"class": "x", "stack-trace": "java.io.IOException: the disk is full\n\tat y"}}
    job = FlinkJob(flink.cluster, "detect")
    job.stop()
    with pytest.raises(
        RuntimeError, match=r"the job goes on, since Flink made no savepoint: java.io.IOException: the disk is full"
    ):
        job.wait()


def test_a_job_that_restarts_since_a_worker_lacks_something_is_ended_with_what_that_is(flink_of):
    """Flink would restart it for minutes, and say so only then."""
    flink = flink_of(a=["RUNNING", "RESTARTING"])
    lacks = "pipeline.errors.OutputError: output /out: expected a folder that launcher and workers share [while running 'List']"
    flink.stacktrace = re.sub(r"google\.api_core.*", lacks, JAVA)
    with pytest.raises(RuntimeError) as raised:
        FlinkJob(flink.cluster, "detect").wait()
    with pytest.raises(OutputError, match=r"^output /out: expected a folder that launcher and workers share$"):
        failed(raised.value)
    assert flink.asked[-1] == "PATCH /jobs/a"


def test_a_job_is_found_by_its_name_among_those_that_are_new(flink_of):
    flink = flink_of(old=["FAILED"], new=["FINISHED"])
    assert FlinkJob(flink.cluster, "detect", None, frozenset({"old"})).submitted() == "new"


@pytest.mark.parametrize(
    ("flags", "master"),
    [
        ([], ""),
        (["--flink_master=[local]"], ""),
        (["--flink_master=h:8081"], "h:8081"),
        (["--flink_master=http://h:8081"], "h:8081"),
    ],
)
def test_where_flink_is_the_user_says(flags, master):
    assert master_of(PipelineOptions(flags)) == master


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ""),
        ("one line", "one line"),
        (JAVA, "google.api_core.exceptions.NotFound: 404 the subscription is gone [while running 'Pull']"),
        ("a.B: c\n\tat d\nCaused by: e.F: g\n\tat h\n\t... 3 more\n", "e.F: g"),
    ],
    ids=["nothing", "one line", "Python in Java", "Java"],
)
def test_the_reason_is_what_lies_at_the_bottom(text, reason):
    """Flink wraps the exception that counts into others."""
    assert _reason(text) == reason


@pytest.mark.parametrize(
    ("flags", "is_cached", "said"),
    [
        pytest.param([], False, 1, id="fetched"),
        pytest.param([], True, 0, id="in Beam's cache"),
        pytest.param(["--job_endpoint=localhost:1"], False, 0, id="a job server"),
        pytest.param(["--flink_job_server_jar={jar}"], False, 0, id="a jar"),
    ],
)
def test_a_job_without_a_job_server_says_at_once_that_beam_fetches_one(flags, is_cached, said, tmp_path, monkeypatch, capsys):
    """It takes its time, and offline half a minute to fail."""
    monkeypatch.setattr(JavaJarServer, "JAR_CACHE", str(tmp_path))
    (tmp_path / "own.jar").touch()
    options = PipelineOptions(["--runner=FlinkRunner", *(flag.format(jar=tmp_path / "own.jar") for flag in flags)])
    if is_cached:
        (tmp_path / FlinkJarJobServer(options).path_to_jar().rpartition("/")[2]).touch()
    flink_options.say_what_is_fetched(options)
    assert capsys.readouterr().err.count("FlinkRunner without --job_endpoint: Beam fetches beam-runners-flink-") == said
