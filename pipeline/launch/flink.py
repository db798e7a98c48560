"""A job on a Flink cluster as its launcher sees it: found by its name, waited for, stopped with a savepoint, by Flink's REST API.

Beam's job server submits the job and then is not needed any more: its own wait ends where the server or the connection does, its
end of a stream cancels it, and it knows of no savepoints. https://nightlies.apache.org/flink/flink-docs-release-1.19/docs/ops/rest_api/
"""

from __future__ import annotations

import http
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from apache_beam.options.pipeline_options import FlinkRunnerOptions, GoogleCloudOptions
from apache_beam.runners.portability import flink_runner

from pipeline.errors import RunnerError

_LOOK_SECONDS = 1.0
_ASK_SECONDS = 10.0
_UNREACHABLE_SECONDS = 60.0  # a launcher rides out a short loss of the network; the job itself does not depend on it
_MISSING_SECONDS = 120.0  # so long may a submitted job be unknown to it
_BEGIN_SECONDS = 300.0  # what a worker cannot reach by then it never will: to restart the job would only hide that
_ENDED = ("FINISHED", "CANCELED", "FAILED")


class FlinkRunner(flink_runner.FlinkRunner):
    """Beam's runner, whose jobs on a cluster that `--flink_master` names are followed there."""

    def run_portable_pipeline(self, pipeline: Any, options: Any) -> Any:
        """Submits a job; gives back what its end can be waited for with."""
        master = master_of(options)
        if not master:
            return super().run_portable_pipeline(pipeline, options)
        cloud, cluster = options.view_as(GoogleCloudOptions), Cluster(master)
        cloud.job_name = cloud.job_name or f"detect-{time.time_ns():x}"
        before = cluster.jobs_named(cloud.job_name)
        return FlinkJob(cluster, cloud.job_name, super().run_portable_pipeline(pipeline, options), before)


def master_of(options: Any) -> str:
    """`host:port` of Flink's REST API, "" where nobody says."""
    master = str(options.view_as(FlinkRunnerOptions).flink_master or "").split("://")[-1]
    return "" if master.startswith("[") else master


class Cluster:
    """Flink's REST API.

    Args:
      master: `host:port`.
    """

    def __init__(self, master: str):
        self._url = f"http://{master}"

    def ask(self, path: str, body: Any = None, method: str = "") -> Any:
        """What it answers; with a body, to a request that does something.

        Raises:
          RunnerError: It refuses, for the reason that the message has.
          OSError: It cannot be reached, or has no leader yet.
        """
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310  http, and where the user said
            self._url + path, content, {"Content-Type": "application/json"}, method=method or None
        )
        try:
            with urllib.request.urlopen(request, timeout=_ASK_SECONDS) as answer:  # noqa: S310
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as err:
            if err.code == http.HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            raise RunnerError(f"Flink at {self._url}{path}: {_reason(err.read().decode(errors='replace'))}") from err

    def jobs_named(self, name: str) -> frozenset[str]:
        """The ids of all jobs of a name, also of those that have ended."""
        return frozenset(str(job["jid"]) for job in self.ask("/jobs/overview")["jobs"] if job["name"] == name)

    def state(self, job: str) -> str:
        """The state of a job."""
        return str(self.ask(f"/jobs/{job}")["state"])

    def latest_checkpoint(self, job: str) -> str:
        """Where the latest checkpoint of a job is, or the one that it began with; "" where there is none to go on from.

        A cluster without `state.checkpoints.dir` keeps checkpoints in the JobManager's memory, and names no place.
        """
        try:
            latest = self.ask(f"/jobs/{job}/checkpoints")["latest"]
        except RunnerError:  # a batch job has no checkpoints
            return ""
        place = str((latest["completed"] or latest["restored"] or {}).get("external_path"))
        return place if ":" in place else ""

    def why_failed(self, job: str) -> str:
        """Why a job has failed, in one line."""
        found = self.ask(f"/jobs/{job}/exceptions")
        entries = (found.get("exceptionHistory") or {}).get("entries") or []
        return _reason(str(entries[0]["stacktrace"] if entries else found.get("root-exception") or "Flink does not say why"))

    def stop(self, job: str) -> str:
        """Begins to stop a job with a savepoint; without drain, which would close windows early. Returns the request."""
        return str(self.ask(f"/jobs/{job}/stop", {"drain": False})["request-id"])

    def savepoint(self, job: str, request: str) -> str:
        """Where the savepoint of a request is; "" while it is under way.

        Raises:
          RuntimeError: There will be none.
        """
        found = self.ask(f"/jobs/{job}/savepoints/{request}")
        if found["status"]["id"] != "COMPLETED":
            return ""
        if "failure-cause" in found["operation"]:
            raise RuntimeError(
                f"the job goes on, since Flink made no savepoint: {_reason(found['operation']['failure-cause']['stack-trace'])}"
            )
        return str(found["operation"]["location"])


class FlinkJob:
    """A job on a cluster.

    Args:
      cluster: Where it runs.
      name: Its name, by which it is found.
      submitted: What Beam calls its result.
      before: The jobs of this name that there were before.
    """

    def __init__(self, cluster: Cluster, name: str, submitted: Any = None, before: frozenset[str] = frozenset()):
        self._cluster = cluster
        self._name = name
        self._submitted = submitted
        self._before = before
        self._stop = threading.Event()
        self._begun = self._heard = time.monotonic()
        self._job = self._restarted = self._checkpoint = ""

    def stop(self) -> None:
        """Asks `wait` to stop the job with a savepoint; safe in a signal's handler."""
        self._stop.set()

    def cancel(self) -> None:
        """Ends the job at once."""
        if self._find():
            self._cluster.ask(f"/jobs/{self._job}", method="PATCH")

    def submitted(self) -> str:
        """Waits until Flink has the job; returns its id."""
        end = time.monotonic() + _MISSING_SECONDS
        while not self._find():
            if self._submitted and self._submitted.state == "FAILED":
                self._submitted.wait_until_finish()  # raises, with the reason
            if time.monotonic() > end:
                raise RunnerError(f"Flink has no job {self._name} within {_MISSING_SECONDS:g} s after it was submitted")
            time.sleep(_LOOK_SECONDS)
        return self._job

    def wait(self) -> None:
        """Waits for the job's end, and stops it where it was told to.

        Raises:
          RuntimeError: It failed or was cancelled, Flink is out of reach or has lost it, or makes no savepoint.
          RunnerError: Flink has no such job.
        """
        job, request = self.submitted(), ""
        self._begun = self._heard = time.monotonic()
        while True:
            try:
                state = self._look()
                if request and (place := self._cluster.savepoint(job, request)):
                    print(f"stopped with a savepoint; --resume {place} goes on from there", file=sys.stderr, flush=True)
                    return
                if state in _ENDED and not request:
                    break
                if self._stop.is_set() and not request:
                    request = self._cluster.stop(job)
            except OSError as err:
                if time.monotonic() - self._heard > _UNREACHABLE_SECONDS:
                    raise RuntimeError(f"Flink is out of reach: {err}; {self._how_to_go_on()}") from err
            time.sleep(_LOOK_SECONDS / 4)
        if state != "FINISHED":
            if self._checkpoint:
                print(self._how_to_go_on(), file=sys.stderr, flush=True)
            raise RuntimeError(self._cluster.why_failed(job) if state == "FAILED" else f"job {job} was cancelled")

    def _look(self) -> str:
        """The job's state; remembers its latest checkpoint.

        Raises:
          RuntimeError: Flink has lost the job, or the job cannot begin.
        """
        try:
            state = self._cluster.state(self._job)
        except RunnerError as err:
            raise RuntimeError(f"Flink has lost job {self._job} with its JobManager; {self._how_to_go_on()}") from err
        self._heard = time.monotonic()
        if state == "RESTARTING":
            self._restarts(self._cluster.why_failed(self._job))
        checkpoint = self._cluster.latest_checkpoint(self._job)
        if checkpoint and not self._checkpoint:
            print(f"the job's first checkpoint is {checkpoint}; later ones replace it", file=sys.stderr, flush=True)
        self._checkpoint = checkpoint or self._checkpoint
        return state

    def _restarts(self, why: str) -> None:
        """Says why the job restarts; ends it where a worker has said at its begin what the user must mend.

        Raises:
          RuntimeError: It is ended.
        """
        if why.startswith("pipeline.errors.") and self._heard < self._begun + _BEGIN_SECONDS:
            self.cancel()
            raise RuntimeError(why)
        if why != self._restarted:
            print(f"the job restarts: {why}", file=sys.stderr, flush=True)
            self._restarted = why

    def _how_to_go_on(self) -> str:
        """How the user goes on where Flink does not; Flink may have made a later checkpoint than the last one seen."""
        if not self._checkpoint:
            return "this launcher knows no checkpoint of it"
        return f"--resume {self._checkpoint} (or a later checkpoint beside it) goes on from there"

    def _find(self) -> str:
        if not self._job:
            self._job = next(iter(self._cluster.jobs_named(self._name) - self._before), "")
        return self._job


def wait(running: Any) -> None:
    """Waits for the end of a job, wherever it is followed."""
    running.wait() if isinstance(running, FlinkJob) else running.wait_until_finish()


def end_stream(running: Any) -> None:
    """Asks for a stream's end."""
    running.stop()


def _reason(text: str) -> str:
    """What a Java stack trace says at its bottom, or the error of Python in it."""
    said = text.replace("\\\\n", "\n").split("Caused by: ")[-1]
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.lstrip().startswith(("at ", "..."))]
    return (lines[-1] if lines else text.strip())[:500]
