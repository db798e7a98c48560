"""Dataflow: the job that `--update` names, templates, where a stream is staged, and the end of a job."""

from __future__ import annotations

import _thread
import contextlib
import os
import posixpath
import time
from collections.abc import Iterator
from typing import Any

from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions, WorkerOptions
from apache_beam.runners.runner import PipelineState

from pipeline import beam_internals
from pipeline.errors import RunnerError
from pipeline.failures import one_line
from pipeline.log_lines import console
from pipeline.software import OF_DOCKERFILE, here, of_image
from pipeline.storage.cloud import google_error
from pipeline.storage.store import kind_of_error

_LOOK_SECONDS = 5.0
_FLEX = "FLEX_TEMPLATE_PYTHON_PY_FILE"  # https://cloud.google.com/dataflow/docs/guides/templates/configuring-flex-templates


def check(options: Any) -> None:
    """Checks that `--update` names a running job, since Beam would look for it without end, and that a template is used once.

    Raises:
      RunnerError: One of these does not hold, or the workers' image has other versions than this process.
      AwayError: The service does not answer.
    """
    cloud = options.view_as(GoogleCloudOptions)
    image = options.view_as(WorkerOptions).sdk_container_image
    if image and (found := of_image(image)) and not found.fits(here()):
        raise RunnerError(f"sdk_container_image {image}: has {found}, expected those of the launcher: {here()}; build it anew")
    if cloud.template_location and _FLEX not in os.environ:
        raise RunnerError(
            "template_location: a classic template would start the same run each time; use a Flex Template, whose launcher runs "
            f"in a container with {_FLEX}, or leave the flag out"
        )
    if not cloud.update:
        return
    try:
        running = beam_internals.active_dataflow_jobs(cloud)
    except Exception as err:
        kind = kind_of_error(google_error(err), RunnerError)
        raise kind(f"--update: Dataflow does not list its jobs: {' '.join(str(err).split())[:300]}") from err
    if cloud.job_name not in running:
        there = ", ".join(running) or "nothing"
        raise RunnerError(f"--update: expected --job_name of a job that runs in {cloud.region}: {there}; got {cloud.job_name}")


def doubts(options: Any) -> Iterator[str]:
    """What a dry run cannot check of the workers' image: which versions one has that is not on this machine."""
    image = options.view_as(WorkerOptions).sdk_container_image
    if image and not of_image(image) and not OF_DOCKERFILE.fits(here()):
        yield f"launcher: {here()}; an image of deploy/Dockerfile has {OF_DOCKERFILE}, unless build arguments say otherwise"


def check_stream(options: Any) -> None:
    """Stages a stream's files beside its temporary files, unless the user names a place.

    Beam would stage them among the temporary files. Lifecycle rules of buckets delete those, and a worker that starts later
    needs the staged files.
    """
    cloud = options.view_as(GoogleCloudOptions)
    if not cloud.staging_location:
        bucket, _, folder = cloud.temp_location.removeprefix("gs://").rstrip("/").partition("/")
        cloud.staging_location = f"gs://{posixpath.join(bucket, posixpath.dirname(folder), 'staging')}"


def job_of(running: Any, options: Any) -> tuple[str, str]:
    """Where a job runs, as flags, and its id there; empty for a template, of which the service makes a job."""
    cloud = options.view_as(GoogleCloudOptions)
    place = {"project": cloud.project, "region": cloud.region, "dataflow_endpoint": cloud.dataflow_endpoint}
    flags = [*(f"--{name}={value}" for name, value in place.items()), *(["--no_auth"] if cloud.no_auth else [])]
    return (" ".join(flags), str(running.job_id())) if running.has_job else ("", "")


def attached(place: str, job: str, *, streams: bool) -> Any:
    """A job that another process has submitted."""
    return beam_internals.dataflow_job(PipelineOptions(place.split()), job)


def drain(running: Any) -> None:
    """Has a thread drain a stream; safe in a signal's handler, which no failure of the service may leave."""
    _thread.start_new_thread(_drain, (running,))


def _drain(running: Any) -> None:
    """Asks Dataflow until it drains the job, for as long as this process waits for that."""
    said = ""
    while True:
        try:
            beam_internals.drain_dataflow_job(running)
        except Exception as err:  # noqa: BLE001  the network may be away, or permission missing
            if (why := one_line(err)) != said:
                console.warning("Dataflow does not drain the stream yet, and is asked again: %s", why)
            said = why
            time.sleep(_LOOK_SECONDS)
        else:
            return


def wait(running: Any) -> None:
    """Waits until a job is done, drained, or replaced by an update.

    Beam's own wait takes the last two for failures, gives up on a job that drains for longer than 50 s, and ends where the
    service refuses an answer once. The job goes on then, and so does this wait.

    Raises:
      Exception: The job failed, or was cancelled.
    """
    try:
        running.wait_until_finish()
    except Exception:
        state = ""
        while not (state and PipelineState.is_terminal(state)):
            with contextlib.suppress(Exception):  # the network may be away for an hour
                state = running.state
            if not (state and PipelineState.is_terminal(state)):
                time.sleep(_LOOK_SECONDS)
        if state not in (PipelineState.DONE, PipelineState.DRAINED, PipelineState.UPDATED):
            raise
