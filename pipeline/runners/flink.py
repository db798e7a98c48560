"""Jobs on Flink: their options, and the end of a job on a cluster, which its launcher awaits by Flink's REST API.

Beam's job server submits the job and then is not needed any more: its own wait ends where the server or the connection does, its
end of a stream cancels it, and it knows of no savepoints. https://nightlies.apache.org/flink/flink-docs-release-1.19/docs/ops/rest_api/
"""

from __future__ import annotations

import http
import threading
import time
from collections.abc import Callable
from typing import Any

import requests
from apache_beam.options.pipeline_options import FlinkRunnerOptions, GoogleCloudOptions, PipelineOptions, StandardOptions
from apache_beam.runners.portability import flink_runner

from pipeline.errors import ConfigError, GoesOnError, RunnerError
from pipeline.log_lines import console

_LOOK_SECONDS = 0.25
_ASK_SECONDS = 10.0
_UNREACHABLE_SECONDS = 60.0  # a launcher rides out a short loss of the network; the job itself does not depend on it
_MISSING_SECONDS = 120.0  # so long may a submitted job be unknown to it
_BEGIN_SECONDS = 300.0  # what a worker cannot reach by then it never will: to restart the job would only hide that
_ENDED = ("FINISHED", "CANCELED", "FAILED")
_SWITCH: dict[str, Any] = {"action": "store_true", "default": None}
_OPTIONS: dict[str, dict[str, Any]] = {  # with what argparse takes
    "object_reuse": _SWITCH,
    "finish_bundle_before_checkpointing": _SWITCH,
    "externalized_checkpoints_enabled": _SWITCH,
    "retain_externalized_checkpoints_on_cancellation": _SWITCH,
    "max_bundle_size": {"type": int},
    "max_bundle_time_mills": {"type": int},
    "checkpointing_interval": {"type": int},
    "min_pause_between_checkpoints": {"type": int},
    "num_concurrent_checkpoints": {"type": int},
    "number_of_execution_retries": {"type": int},
    "execution_retry_delay": {"type": int},
    "state_backend": {},
    "state_backend_storage_path": {},
    "checkpointing_mode": {},
}
_STREAM_DEFAULTS = {
    "finish_bundle_before_checkpointing": True,  # else checkpoints wait for bundles that wait for messages
    "min_pause_between_checkpoints": 1000,  # so that each worker has heard of one's end (`pipeline.stream.delayed_acks`)
    "max_bundle_time_mills": 100,  # an answer waits for the end of its bundle at each of the steps that keep records
    "number_of_execution_retries": 2**31 - 1,  # for as long as the stream lives, whatever the cluster's configuration says
    "execution_retry_delay": 10_000,
    "externalized_checkpoints_enabled": True,
    "retain_externalized_checkpoints_on_cancellation": True,
}


class FlinkStreamOptions(PipelineOptions):
    """Options of Beam's Flink runner, which is Java, and whose options Beam's Python knows only when it submits a job.

    https://beam.apache.org/documentation/runners/flink/
    """

    @classmethod
    def _add_argparse_args(cls, parser: Any) -> None:
        for name, how in _OPTIONS.items():
            parser.add_argument(f"--{name}", **how)
        parser.add_argument(
            "--savepoint_path", "--resume", metavar="PATH", help="savepoint or checkpoint from which a stream goes on"
        )


def check_stream(options: Any) -> None:
    """Makes sure that a stream has checkpoints, one at a time, by which messages are acknowledged; sets what every stream wants.

    Raises:
      ConfigError: It has none.
    """
    given = options.view_as(FlinkStreamOptions)
    if not master_of(options):
        raise ConfigError(
            "expected --flink_master <host>:<port> of Flink's REST API, by which a stream is stopped with a savepoint"
        )
    if (given.checkpointing_interval or 0) <= 0:
        raise ConfigError(
            "expected --checkpointing_interval with milliseconds, e.g. 10000: a stream on Flink acknowledges messages by its "
            "checkpoints"
        )
    if (given.num_concurrent_checkpoints or 1) != 1:
        raise ConfigError(
            "num_concurrent_checkpoints: expected 1, since a checkpoint must hold all that the one before it has finalized"
        )
    for name, value in _STREAM_DEFAULTS.items():
        if getattr(given, name) is None:
            setattr(given, name, value)


def master_of(options: Any) -> str:
    """`host:port` of Flink's REST API, "" where nobody says."""
    master = str(options.view_as(FlinkRunnerOptions).flink_master or "").split("://")[-1]
    return "" if master.startswith("[") else master


class FlinkRunner(flink_runner.FlinkRunner):
    """Beam's runner, whose jobs on a cluster that `--flink_master` names are followed there."""

    def run_portable_pipeline(self, pipeline: Any, options: Any) -> Any:
        """Submits a job; gives back what its end can be waited for with."""
        master = master_of(options)
        if not master:
            return super().run_portable_pipeline(pipeline, options)
        cloud = options.view_as(GoogleCloudOptions)
        cloud.job_name = cloud.job_name or f"detect-{time.time_ns():x}"
        job = FlinkJob(master, cloud.job_name, streams=options.view_as(StandardOptions).streaming)
        job.submitted = super().run_portable_pipeline(pipeline, options)
        return job


class FlinkJob:
    """A job on a cluster.

    Args:
      master: `host:port` of Flink's REST API.
      name: The job's name; the job is the first of this name that was not there before.
      streams: Whether it is a stream, which goes on from a checkpoint.
      job: Its id; empty: Flink does not have it yet.

    Attributes:
      submitted: Beam's result, in the process that submitted it.
      master: As given.

    Raises:
      OSError: Flink cannot be reached.
    """

    def __init__(self, master: str, name: str, *, streams: bool = False, job: str = ""):
        self.submitted: Any = None
        self.master = master
        self._streams = streams
        self._url = f"http://{master}"
        self._name = name
        self._stop = threading.Event()
        self._job, self._restarted = job, ""
        self._before = frozenset[str]() if job else self._jobs()

    def stop(self) -> None:
        """Asks `wait_until_finish` to stop the job with a savepoint; safe in a signal's handler."""
        self._stop.set()

    def cancel(self) -> None:
        """Ends the job, once Flink has it; raises as `job_id` does."""
        self._once_found(lambda: self._ask("", method="PATCH"))

    def job_id(self) -> str:
        """The job's id, once Flink has it.

        Raises:
          RunnerError: Flink has no such job.
          GoesOnError: Flink is out of reach.
        """
        return str(self._once_found(lambda: self._job))

    def _once_found(self, act: Callable[[], Any]) -> Any:
        started = heard = time.monotonic()
        while True:
            try:
                if self._found():
                    return act()
                heard = time.monotonic()
                self._missing(heard - started)
            except OSError as err:
                if time.monotonic() - heard > _UNREACHABLE_SECONDS:
                    raise GoesOnError(f"Flink is out of reach, and job {self._name} may go on: {err}; cancel it there") from err
            time.sleep(_LOOK_SECONDS)

    def wait_until_finish(self) -> None:
        """Waits for the job's end, and stops it where it was told to; without drain, which would close windows early.

        Raises:
          RuntimeError: It failed or was cancelled, or Flink has lost it.
          GoesOnError: Flink is out of reach, or makes no savepoint.
          RunnerError: Flink has no such job.
        """
        state, request = "", ""
        started = heard = time.monotonic()
        while state not in _ENDED or request:
            time.sleep(_LOOK_SECONDS)
            try:
                state = self._state() if self._found() else self._missing(time.monotonic() - started)
                if state and self._stop.is_set() and state not in _ENDED and not request:
                    request = str(self._ask("/stop", {"drain": False}, "POST")["request-id"])
                if request and self._has_savepoint(request):
                    return
                heard = time.monotonic()
                if state == "RESTARTING":
                    self._restarts(self._why_failed(), begins=heard < started + _BEGIN_SECONDS)
            except OSError as err:
                if time.monotonic() - heard > _UNREACHABLE_SECONDS:
                    why = f"Flink is out of reach, and the job may go on, as --attach shows: {err}"
                    raise GoesOnError(f"{why}; {self._how_to_go_on()}") from err
        if state != "FINISHED":
            why = self._why_failed() if state == "FAILED" else f"job {self._job} was cancelled"
            raise RuntimeError(f"{why}; {self._how_to_go_on()}")

    def _ask(self, path: str, body: Any = None, method: str = "GET", job: str = "") -> Any:
        """What Flink answers about the job.

        Raises:
          RunnerError: It refuses, for the reason that the message has.
          OSError: It cannot be reached, or has no leader yet.
        """
        url = f"{self._url}/jobs/{job or self._job}{path}"
        answer = requests.request(method, url, json=body, timeout=_ASK_SECONDS)
        if answer.status_code == http.HTTPStatus.SERVICE_UNAVAILABLE:
            answer.raise_for_status()
        if not answer.ok:
            raise RunnerError(f"Flink at {url}: {_reason(answer.text)}")
        return answer.json() if answer.content else {}

    def _jobs(self) -> frozenset[str]:
        """The ids of all jobs of this name, also of those that have ended."""
        return frozenset(str(job["jid"]) for job in self._ask("", job="overview")["jobs"] if job["name"] == self._name)

    def _found(self) -> bool:
        self._job = self._job or next(iter(self._jobs() - self._before), "")
        return self._job != ""

    def _missing(self, seconds: float) -> str:
        """The state of a job that Flink does not have yet, so long after it was submitted."""
        if self.submitted and self.submitted.state == "FAILED":
            self.submitted.wait_until_finish()  # raises, with the reason
        if seconds > _MISSING_SECONDS:
            raise RunnerError(f"Flink has no job {self._name} within {_MISSING_SECONDS:g} s after it was submitted")
        return ""

    def _state(self) -> str:
        try:
            return str(self._ask("")["state"])
        except RunnerError as err:
            raise RuntimeError(f"Flink has lost job {self._job} with its JobManager; {self._how_to_go_on()}") from err

    def _has_savepoint(self, request: str) -> bool:
        """Whether the savepoint of a request is there, whose place is then printed.

        Raises:
          GoesOnError: There will be none.
        """
        found = self._ask(f"/savepoints/{request}")
        if found["status"]["id"] != "COMPLETED":
            return False
        if "failure-cause" in found["operation"]:
            why = _reason(found["operation"]["failure-cause"]["stack-trace"])
            raise GoesOnError(f"the job goes on, since Flink made no savepoint: {why}")
        place = found["operation"]["location"]
        console.info("stopped with a savepoint; --resume %s goes on from there", place)
        return True

    def _why_failed(self) -> str:
        found = self._ask("/exceptions")
        entries = (found.get("exceptionHistory") or {}).get("entries") or []
        return _reason(str(entries[0]["stacktrace"] if entries else found.get("root-exception") or "Flink does not say why"))

    def _restarts(self, why: str, *, begins: bool) -> None:
        """Says why the job restarts; ends it where a worker has said at its begin what the user must fix."""
        if begins and why.startswith("pipeline.errors."):
            self.cancel()
            raise RuntimeError(why)
        if why != self._restarted:
            console.info("the job restarts: %s", why)
            self._restarted = why

    def _how_to_go_on(self) -> str:
        latest = f"<state.checkpoints.dir>/{self._job}/chk-<latest>"
        return f"--resume {latest} goes on from there" if self._streams else "the same command does the rest"


def job_of(running: Any, _options: Any) -> tuple[str, str]:
    """Where a job runs, and its id there, given what was submitted; empty without Flink's REST API."""
    return (running.master, running.job_id()) if isinstance(running, FlinkJob) else ("", "")


def attached(master: str, job: str, *, streams: bool) -> FlinkJob:
    """A job that another process has submitted."""
    return FlinkJob(master, job, streams=streams, job=job)


def _reason(text: str) -> str:
    """What a Java stack trace says at its bottom, or the error of Python in it."""
    said = text.replace("\\\\n", "\n").split("Caused by: ")[-1]
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.lstrip().startswith(("at ", "..."))]
    return (lines[-1] if lines else text.strip())[:500]
