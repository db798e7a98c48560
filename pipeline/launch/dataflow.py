"""What a launcher does for a job that runs on Dataflow: looks for the one to update, waits for its end, and drains it."""

from __future__ import annotations

import posixpath
import time
from typing import Any

from pipeline.errors import RunnerError

_LOOK_SECONDS = 5.0


def check(options: Any) -> None:
    """Makes sure that `--update` names a job that runs; Beam would look for it without end.

    Args:
      options: Beam's options.

    Raises:
      RunnerError: None does, or the service cannot be asked.
    """
    from apache_beam.options.pipeline_options import GoogleCloudOptions

    cloud = options.view_as(GoogleCloudOptions)
    if cloud.update and cloud.region:
        from apache_beam.runners.dataflow.internal import apiclient

        request = apiclient.dataflow.ListJobsRequest(project_id=cloud.project, location=cloud.region, filter="ACTIVE")
        try:
            running = sorted(job.name for job in apiclient.DataflowApplicationClient(cloud)._jobs_client.list_jobs(request))
        except Exception as err:
            raise RunnerError(f"--update: Dataflow does not say what runs: {' '.join(str(err).split())[:300]}") from err
        if cloud.job_name not in running:
            there = ", ".join(running) or "nothing"
            raise RunnerError(
                f"--update: expected --job_name of a job that runs in {cloud.region}: {there}; got {cloud.job_name}"
            )


def check_stream(options: Any) -> None:
    """Stages a stream's files beside its temporary files, where nobody says where.

    Beam would stage them among the temporary files, which buckets' lifecycle rules delete, and a worker that starts later fetches
    what is staged.

    Args:
      options: Beam's options.
    """
    from apache_beam.options.pipeline_options import GoogleCloudOptions

    cloud = options.view_as(GoogleCloudOptions)
    if not cloud.staging_location:
        bucket, _, folder = cloud.temp_location.removeprefix("gs://").rstrip("/").partition("/")
        cloud.staging_location = f"gs://{posixpath.join(bucket, posixpath.dirname(folder), 'staging')}"


def wait(running: Any) -> None:
    """Waits until a job is done, drained, or replaced by an update of it.

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


def drain(running: Any) -> None:
    """Asks Dataflow to take no more messages, and to finish what it has: https://cloud.google.com/dataflow/docs/guides/stopping-a-pipeline."""
    running._runner.dataflow_client.modify_job_state(running.job_id(), "JOB_STATE_DRAINING")
