"""Every private function of Apache Beam that this project calls or replaces, each with the public way that is missing.

Checked with Beam 2.77, the release of requirements.lock; setup.py allows those from 2.75 to 2.79. Each function has a test, which
fails after an upgrade that changes what it needs; docs/design.md has a table, and names the tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_SAMPLING_MS = 20


def end_bundles_promptly() -> None:
    """Makes this process's workers end their bundles up to 0.2 s sooner.

    Missing in public, up to Beam 2.77: an option for the sampling period. Beam ends a bundle by joining the thread that samples
    which step is busy, and that thread sleeps for up to 200 ms at a time.
    """
    from apache_beam.runners.worker.statesampler import StateSampler

    StateSampler.__init__.__defaults__ = (_SAMPLING_MS,)


def add_up_metrics_at_once() -> None:
    """Makes the in-memory runner add up each bundle's user metrics when the bundle ends, and drop Beam's own.

    Missing in public, up to Beam 2.77: a stream whose memory is bounded. `run_stages` chains a generator over the bundle's
    metrics to the one before, and nothing consumes the chain before the job ends. Most metrics are Beam's own.
    """
    from apache_beam.metrics import monitoring_infos
    from apache_beam.runners.portability.fn_api_runner import fn_runner

    def consolidated(infos: Iterable[Any]) -> list[Any]:
        return list(monitoring_infos.consolidate(filter(monitoring_infos.is_user_monitoring_info, infos)))

    fn_runner.consolidate_monitoring_infos = consolidated


def let_inference_measure_memory() -> None:
    """Gives RunInference Python's module `resource`, which it needs to measure a model's memory.

    Missing in public, up to Beam 2.77: RunInference without PyTorch. It imports `resource` beside its model manager, which takes
    PyTorch, and counts both as missing without that. Then it warns twice in each process that the platform has no `resource`.
    """
    import resource

    from apache_beam.ml.inference import base

    base.resource = resource


def active_dataflow_jobs(cloud: Any) -> list[str]:
    """The names of the jobs that Dataflow runs in a project and region, sorted.

    Missing in public, up to Beam 2.77: a client with the credentials and the endpoint of Beam's options.

    Args:
      cloud: Beam's `GoogleCloudOptions`.
    """
    from apache_beam.runners.dataflow.internal import apiclient

    request = apiclient.dataflow.ListJobsRequest(project_id=cloud.project, location=cloud.region, filter="ACTIVE")
    return sorted(job.name for job in apiclient.DataflowApplicationClient(cloud)._jobs_client.list_jobs(request))


def drain_dataflow_job(running: Any) -> None:
    """Makes Dataflow drain a job: it pulls no more messages, and finishes those that it has.

    Missing in public, up to Beam 2.77: the result of a pipeline can only cancel.

    Args:
      running: Beam's `DataflowPipelineResult`.
    """
    running._runner.dataflow_client.modify_job_state(running.job_id(), "JOB_STATE_DRAINING")


def dataflow_job(options: Any, job: str) -> Any:
    """A job of Dataflow that another process has submitted, as Beam gives it to the one that submits.

    Missing in public, up to Beam 2.77: the result of a pipeline for the id of a job.

    Args:
      options: Beam's options.
      job: Its id.
    """
    from apache_beam.runners.dataflow.dataflow_runner import DataflowPipelineResult, DataflowRunner
    from apache_beam.runners.dataflow.internal import apiclient

    runner = DataflowRunner()
    runner.dataflow_client = apiclient.DataflowApplicationClient(options)
    return DataflowPipelineResult(runner.dataflow_client.get_job(job), runner, options)


def fetch_prism(options: Any) -> str:
    """Has Beam fetch Prism from its release, unless its cache has it; returns the path of the binary.

    Missing in public, up to Beam 2.77: Prism in a process group of its own. `PrismRunner` starts it in the terminal's group,
    where Ctrl-C ends it before the job's work in flight is finished.

    Args:
      options: Beam's options.
    """
    from apache_beam.runners.portability.prism_runner import PrismJobServer

    command, _endpoint = PrismJobServer(options).subprocess_cmd_and_endpoint()
    return str(command[0])
