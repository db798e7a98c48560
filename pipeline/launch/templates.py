"""Writes a job as a template, for a service that starts it later: Dataflow's templates, classic and Flex."""

from __future__ import annotations

from collections.abc import Callable

import apache_beam as beam

from pipeline.launch.finalize import DONE, failed
from pipeline.launch.options import Job


def write_template(job: Job, build: Callable[[beam.Pipeline], None]) -> int:
    """Writes the job's graph to `--template_location`; nothing runs. Returns the exit code.

    Args:
      job: A job with a template's place.
      build: Adds the job's steps to a pipeline.
    """
    try:
        pipeline = job.pipeline()
        build(pipeline)
        pipeline.run()  # Beam submits nothing where a template is asked for
    except Exception as err:  # noqa: BLE001  whatever ended it, its user gets one line
        return failed(err)
    print(f"template written to {job.template}; nothing runs yet; its results will go to {job.config.output}")
    return DONE
