"""The part of Dataflow's REST service that a launcher uses: it takes jobs or refuses them, keeps their states, and runs nothing.

https://cloud.google.com/dataflow/docs/reference/rest/v1b3/projects.locations.jobs; the lists below are Google's.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from apache_beam.portability.api import beam_runner_api_pb2
from google.cloud.dataflow_v1beta3 import Job, JobState

from pipeline.storage.files import read_file
from tests.emulators import answering

BATCH, STREAMING = "configs/batch_gcs_dataflow_gpu.yaml", "configs/streaming_pubsub_dataflow_gpu.yaml"
CLOUD = ["--project=test-project", "--region=europe-west1", "--no_auth"]
# https://cloud.google.com/dataflow/docs/resources/locations
_REGIONS = re.compile(
    r"africa-south1|asia-(east[12]|northeast[123]|south[12]|southeast[12])|australia-southeast[12]|europe-(central2|north[12]|"
    r"southwest1|west([1234689]|1[02]))|me-(central[12]|west1)|northamerica-(northeast[12]|south1)|southamerica-(east1|west1)|"
    r"us-(central1|east[145]|south1|west[1234])"
)
# https://cloud.google.com/compute/docs/general-purpose-machines, .../accelerator-optimized-machines
_MACHINES = re.compile(
    r"n1-(standard-(1|2|4|8|16|32|64|96)|high(mem|cpu)-(2|4|8|16|32|64|96))|n2d?-(standard|highmem|highcpu)-(2|4|8|16|32|48|64|80|96)"
    r"|e2-(standard|highmem|highcpu)-(2|4|8|16|32)|c3-(standard|highmem|highcpu)-(4|8|22|44|88|176)|g2-standard-(4|8|12|16|24|32|48|96)"
    r"|a2-highgpu-[1248]g|a2-ultragpu-[1248]g|a3-highgpu-[1248]g|a3-megagpu-8g"
)
# https://cloud.google.com/dataflow/docs/gpu/gpu-support: a type, and the machines that it goes with
_ACCELERATORS = {
    "nvidia-tesla-p4": "n1-",
    "nvidia-tesla-p100": "n1-",
    "nvidia-tesla-v100": "n1-",
    "nvidia-tesla-t4": "n1-",
    "nvidia-l4": "g2-",
    "nvidia-tesla-a100": "a2-highgpu-",
    "nvidia-a100-80gb": "a2-ultragpu-",
    "nvidia-h100-80gb": "a3-highgpu-",
    "nvidia-h100-mega-80gb": "a3-megagpu-",
}
_ACCELERATOR = re.compile(r"type:([\w-]+);count:(1|2|4|8|16)(;install-nvidia-driver(:[\w.]+)?|;use_nvidia_mps)*")
_NAME = re.compile(
    r"[a-z]([-a-z0-9]{0,1022}[a-z0-9])?"
)  # https://cloud.google.com/dataflow/docs/reference/rest/v1b3/projects.jobs#Job
_LEAST_DISK_GB = 30  # https://cloud.google.com/dataflow/docs/guides/configure-worker-vm
_AFTER = {"JOB_STATE_DRAINING": "JOB_STATE_DRAINED", "JOB_STATE_CANCELLED": "JOB_STATE_CANCELLED"}


class DataflowService:
    """Jobs by id, as they came, with their states.

    A job is refused as Google's service does: unknown fields, and values that its documentation does not list.
    `running` is set when a launcher has asked for the state of a running job; `on_create` is called while one is submitted.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.jobs: dict[str, dict[str, Any]] = {}
        self.running = threading.Event()
        self.first_state = "JOB_STATE_RUNNING"
        self.refusals = Counter[str]()  # so many of the next requests about a job, by their method
        self.on_create: Callable[[], None] = lambda: None
        self.read: Callable[[str], bytes] = read_file
        self._looks_while_draining = 1

    def answer(self, method: str, path: str, content: bytes, _headers: Any) -> tuple[int, Any]:
        """The status and body of the answer to a request."""
        body = json.loads(content or b"{}")
        region, job_id, below = re.fullmatch(
            r"/v1b3/projects/[^/]+/locations/([^/]+)/jobs(?:/([^/?]+)(/\w+)?)?(?:\?.*)?", path
        ).groups()
        if below:
            return 200, {}
        if method == "POST":
            if faults := [*self._faults(body, region)]:
                return 400, {"error": {"code": 400, "status": "INVALID_ARGUMENT", "message": "; ".join(faults)}}
            job = {**body, "id": f"job-{len(self.jobs)}", "currentState": self.first_state}
            if "replaceJobId" in body:
                self.jobs[body["replaceJobId"]]["currentState"] = "JOB_STATE_UPDATED"
            self.jobs[job["id"]] = job
            self.on_create()
            return 200, job
        if job_id is None:
            return 200, {"jobs": list(self.jobs.values())}
        job = self.jobs[job_id]
        if self.refusals[method]:
            self.refusals[method] -= 1
            return 403, {"error": {"code": 403, "status": "PERMISSION_DENIED", "message": "a quota, say"}}
        if method == "PUT":
            job["currentState"] = job["requestedState"] = JobState(body["requestedState"]).name  # clients send numbers
        elif "requestedState" not in job:
            self.running.set()
        elif self._looks_while_draining:
            self._looks_while_draining -= 1
        else:
            job["currentState"] = _AFTER[job["requestedState"]]
        return 200, job

    def _faults(self, body: dict[str, Any], region: str) -> Iterator[str]:
        """What Google's service would refuse in a job that is submitted."""
        try:
            job = Job.from_json(json.dumps(body))
        except Exception as err:  # noqa: BLE001  an unknown field or value of an enumeration
            yield f"no job: {err}"
            return
        if not _REGIONS.fullmatch(region):
            yield f"there is no region {region}"
        if not _NAME.fullmatch(job.name):
            yield f"a job cannot have the name {job.name}"
        hints = {each for each in map(_accelerator, self._graph(body).components.environments.values()) if each}
        for pool in job.environment.worker_pools:
            yield from _faults_of(pool, hints)

    def _graph(self, body: dict[str, Any]) -> beam_runner_api_pb2.Pipeline:
        """The job's graph, as the launcher has staged it."""
        url = body["environment"]["sdkPipelineOptions"]["options"]["pipelineUrl"]
        return beam_runner_api_pb2.Pipeline.FromString(self.read(url))


def _faults_of(pool: Any, hints: Iterable[str]) -> Iterator[str]:
    if pool.machine_type and not _MACHINES.fullmatch(pool.machine_type):
        yield f"there is no machine type {pool.machine_type}"
    if 0 < pool.disk_size_gb < _LEAST_DISK_GB:
        yield f"disk_size_gb {pool.disk_size_gb} is less than {_LEAST_DISK_GB}"
    if 0 < pool.autoscaling_settings.max_num_workers < pool.num_workers:
        yield f"num_workers {pool.num_workers} is more than max_num_workers"
    for hint in hints:
        found = _ACCELERATOR.fullmatch(hint)
        if not (found and found[1] in _ACCELERATORS):
            yield f"there is no accelerator {hint}"
        elif pool.machine_type and not pool.machine_type.startswith(_ACCELERATORS[found[1]]):
            yield f"{found[1]} goes with {_ACCELERATORS[found[1]]}…, not with {pool.machine_type}"


def _accelerator(environment: beam_runner_api_pb2.Environment) -> str:
    return environment.resource_hints["beam:resources:accelerator:v1"].decode()


@contextlib.contextmanager
def running_dataflow_service() -> Iterator[DataflowService]:
    """Runs a service for the length of a block."""
    service = DataflowService()
    with answering(service.answer) as port:
        service.endpoint = f"http://localhost:{port}"
        yield service
