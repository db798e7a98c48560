"""The part of Dataflow's REST service that a launcher talks to, for tests: it takes jobs, keeps their states, and runs nothing.

https://cloud.google.com/dataflow/docs/reference/rest/v1b3/projects.locations.jobs
"""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

from google.cloud.dataflow_v1beta3 import JobState

_AFTER = {"JOB_STATE_DRAINING": "JOB_STATE_DRAINED", "JOB_STATE_CANCELLED": "JOB_STATE_CANCELLED"}


class DataflowService:
    """A running service.

    Attributes:
      endpoint: For `--dataflow_endpoint`.
      jobs: Jobs by id, as they came, with their states.
      running: Is set when a launcher has asked for the state of a running job.
      first_state: The state of a job that comes.
      looks_while_draining: How often a job that drains is looked at before it is drained.
    """

    def __init__(self, endpoint: str):
        self.endpoint = endpoint
        self.jobs: dict[str, dict[str, Any]] = {}
        self.running = threading.Event()
        self.first_state = "JOB_STATE_RUNNING"
        self.looks_while_draining = 1

    def answer(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What the service says to one request."""
        job_id, below = re.fullmatch(r"/v1b3/projects/[^/]+/locations/[^/]+/jobs(?:/([^/]+)(/\w+)?)?", path).groups()
        if below:
            return {}
        if method == "POST":
            return self._create(body)
        if job_id is None:
            return {"jobs": list(self.jobs.values())}
        job = self.jobs[job_id]
        if method == "PUT":
            job["currentState"] = job["requestedState"] = JobState(body["requestedState"]).name  # clients send numbers
        elif "requestedState" not in job:
            self.running.set()
        elif self.looks_while_draining:
            self.looks_while_draining -= 1
        else:
            job["currentState"] = _AFTER[job["requestedState"]]
        return job

    def _create(self, body: dict[str, Any]) -> dict[str, Any]:
        job = {**body, "id": f"job-{len(self.jobs)}", "currentState": self.first_state}
        if "replaceJobId" in body:
            self.jobs[body["replaceJobId"]]["currentState"] = "JOB_STATE_UPDATED"
        self.jobs[job["id"]] = job
        return job


@contextlib.contextmanager
def running_dataflow_service() -> Iterator[DataflowService]:
    """Serves on a free port for the length of a block."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            answer = json.dumps(service.answer(self.command, self.path.split("?")[0], body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service = DataflowService(f"http://localhost:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, name="dataflow service")
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
