"""Dataflow: the machines that a job asks for, the job that `--update` names, and the end of a job."""

from __future__ import annotations

import posixpath
import time
from typing import Any

from pipeline import beam_internals
from pipeline.errors import ConfigError, RunnerError

_LOOK_SECONDS = 5.0
# https://cloud.google.com/compute/docs/gpus: each accelerator goes with machines of one family only
_FAMILIES = {
    "nvidia-tesla-t4": "n1",
    "nvidia-tesla-p4": "n1",
    "nvidia-tesla-p100": "n1",
    "nvidia-tesla-v100": "n1",
    "nvidia-l4": "g2",
    "nvidia-tesla-a100": "a2",
    "nvidia-a100-80gb": "a2",
    "nvidia-h100-80gb": "a3",
    "nvidia-h100-mega-80gb": "a3",
}
_EXAMPLES = {"n1": "n1-standard-8", "g2": "g2-standard-8", "a2": "a2-highgpu-1g", "a3": "a3-highgpu-1g"}


def check_machine(accelerator: str, machine_type: str | None) -> None:
    """Checks that machines of a type can have an accelerator; the service judges accelerators that are not in the table.

    Args:
      accelerator: As Dataflow writes it: `type:nvidia-l4;count:1;install-nvidia-driver`.
      machine_type: Of the workers; None: the service's default, which has no accelerator.

    Raises:
      ConfigError: They cannot.
    """
    parts = dict(part.strip().partition(":")[::2] for part in accelerator.split(";"))
    name = parts.get("type", "")
    family = _FAMILIES.get(name)
    if family and not (machine_type or "").startswith(f"{family}-"):
        expected = f"--machine_type {family}-*, such as {_EXAMPLES[family]}"
        raise ConfigError(f"worker.accelerator {name}: expected {expected}; got {machine_type or 'no --machine_type'}")


def check(options: Any) -> None:
    """Checks that `--update` names a running job; Beam would look for it without end.

    Args:
      options: Beam's options.

    Raises:
      RunnerError: No running job has this name, or the service does not answer.
    """
    from apache_beam.options.pipeline_options import GoogleCloudOptions

    cloud = options.view_as(GoogleCloudOptions)
    if not (cloud.update and cloud.region):
        return
    try:
        running = beam_internals.active_dataflow_jobs(cloud)
    except Exception as err:
        raise RunnerError(f"--update: Dataflow does not list its jobs: {' '.join(str(err).split())[:300]}") from err
    if cloud.job_name not in running:
        there = ", ".join(running) or "nothing"
        raise RunnerError(f"--update: expected --job_name of a job that runs in {cloud.region}: {there}; got {cloud.job_name}")


def check_stream(options: Any) -> None:
    """Stages a stream's files beside its temporary files, unless the user names a place.

    Beam would stage them among the temporary files. Lifecycle rules of buckets delete those, and a worker that starts later
    needs the staged files.

    Args:
      options: Beam's options.
    """
    from apache_beam.options.pipeline_options import GoogleCloudOptions

    cloud = options.view_as(GoogleCloudOptions)
    if not cloud.staging_location:
        bucket, _, folder = cloud.temp_location.removeprefix("gs://").rstrip("/").partition("/")
        cloud.staging_location = f"gs://{posixpath.join(bucket, posixpath.dirname(folder), 'staging')}"


def wait(running: Any) -> None:
    """Waits until a job is done, drained, or replaced by an update.

    Beam's own wait takes the last two for failures, and gives up on a job that drains for longer than 50 s.

    Args:
      running: Beam's `DataflowPipelineResult`.

    Raises:
      Exception: The job failed, or was cancelled.
    """
    from apache_beam.runners.runner import PipelineState

    try:
        running.wait_until_finish()
    except Exception:
        while running.state == PipelineState.DRAINING:
            time.sleep(_LOOK_SECONDS)
        if running.state not in (PipelineState.DRAINED, PipelineState.UPDATED):
            raise
