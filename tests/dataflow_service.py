"""The part of Dataflow's REST service that a launcher uses: it takes jobs, keeps their states, and runs nothing.

https://cloud.google.com/dataflow/docs/reference/rest/v1b3/projects.locations.jobs
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from google.cloud.dataflow_v1beta3 import JobState

from tests.emulators import answering

_AFTER = {"JOB_STATE_DRAINING": "JOB_STATE_DRAINED", "JOB_STATE_CANCELLED": "JOB_STATE_CANCELLED"}


class DataflowService:
    """Jobs by id, as they came, with their states.

    `running` is set when a launcher has asked for the state of a running job; `on_create` is called while one is submitted.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.jobs: dict[str, dict[str, Any]] = {}
        self.running = threading.Event()
        self.first_state = "JOB_STATE_RUNNING"
        self.on_create: Callable[[], None] = lambda: None
        self._looks_while_draining = 1

    def answer(self, method: str, path: str, content: bytes, _headers: Any) -> tuple[int, Any]:
        """The status and body of the answer to a request."""
        body = json.loads(content or b"{}")
        job_id, below = re.fullmatch(r"/v1b3/projects/[^/]+/locations/[^/]+/jobs(?:/([^/?]+)(/\w+)?)?(?:\?.*)?", path).groups()
        if below:
            return 200, {}
        if method == "POST":
            job = {**body, "id": f"job-{len(self.jobs)}", "currentState": self.first_state}
            if "replaceJobId" in body:
                self.jobs[body["replaceJobId"]]["currentState"] = "JOB_STATE_UPDATED"
            self.jobs[job["id"]] = job
            self.on_create()
            return 200, job
        if job_id is None:
            return 200, {"jobs": list(self.jobs.values())}
        job = self.jobs[job_id]
        if method == "PUT":
            job["currentState"] = job["requestedState"] = JobState(body["requestedState"]).name  # clients send numbers
        elif "requestedState" not in job:
            self.running.set()
        elif self._looks_while_draining:
            self._looks_while_draining -= 1
        else:
            job["currentState"] = _AFTER[job["requestedState"]]
        return 200, job


@contextlib.contextmanager
def running_dataflow_service() -> Iterator[DataflowService]:
    """Runs a service for the length of a block."""
    service = DataflowService()
    with answering(service.answer) as port:
        service.endpoint = f"http://localhost:{port}"
        yield service
