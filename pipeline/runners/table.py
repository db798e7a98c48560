"""The table of runners; no other module decides by the name of a runner.

A new runner is one row here and one line in the table of docs/streaming.md; a test compares the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from apache_beam.options.pipeline_options import (
    DirectOptions,
    FlinkRunnerOptions,
    PipelineOptions,
    PortableOptions,
    PrismRunnerOptions,
    SparkRunnerOptions,
)
from apache_beam.runners.runner import create_runner

from pipeline.errors import RunnerError
from pipeline.runners import dataflow, flink, in_memory, prism


def _nothing(*_: Any) -> str:
    """The default of most functions of the table: there is nothing to do or to name."""
    return ""


def _unknown(_running: Any, _options: Any) -> tuple[str, str]:
    return "", ""


def _not_found(_place: str, _job: str, *, streams: bool) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class Runner:
    """What a runner can do.

    Attributes:
      name: Its name in the config.
      acknowledges: When it acknowledges a stream's message: "a message is acknowledged …"; "" if it runs no streams.
      in_process: Whether each step runs in the launcher's process. Then the model is loaded, images are counted and duplicates
        are known there. Answers by request need that too, since the images of a request meet in memory.
      native_source: Whether a stream is read by Beam's own Pub/Sub source; else by the project's splittable DoFn.
      no_stream: Why it cannot run a stream; "" if it can.
      needs: Beam's flags that a job on it needs; of two with `or` between them one.
      has_own_machines: Whether it starts machines by the resource hints of steps, which do not see the launcher's files.
      experiments: Beam's experiments for its jobs, unless the user sets the opposite.
      stream_experiments: More of them, for streams.
      beam_name: The runner's name in Beam, or the full name of its class.
      wait: Waits for the end of a job, given Beam's result; raises if the job failed.
      job_of: Where a submitted job runs, and its id there, given Beam's result and options; empty: only its launcher knows.
      attached: What `wait` and `end_stream` take, for a job that another process has submitted, given the two of `job_of`; None
        if there is none.
      end_stream: Makes a stream finish its work in flight, given Beam's result; for steps in other processes.
      finalizes_early: Whether a checkpoint also finalizes bundles that ended after it began, so that only the next checkpoint
        is sure to hold them.
      check: Checks that the runner can be reached or started, given Beam's options; raises a `RunnerError` if not.
      doubts: What may go wrong on its workers and cannot be checked here, given Beam's options; lines for a dry run.
      check_stream: Checks the options of a stream, and sets the defaults of all streams.
      takes: The classes of Beam's options that are of this runner, and not of all.
      served: Keeps a server that the runner needs alive during a block, given Beam's options.
    """

    name: str
    acknowledges: str = ""
    in_process: bool = False
    native_source: bool = False
    no_stream: str = ""
    needs: tuple[str, ...] = ()
    has_own_machines: bool = False
    experiments: tuple[str, ...] = ()
    stream_experiments: tuple[str, ...] = ()
    beam_name: str = ""
    wait: Callable[[Any], object] = operator.methodcaller("wait_until_finish")
    job_of: Callable[[Any, Any], tuple[str, str]] = _unknown
    attached: Callable[..., Any] = _not_found
    end_stream: Callable[[Any], object] = _nothing
    finalizes_early: bool = False
    takes: tuple[type[PipelineOptions], ...] = ()
    check: Callable[[Any], object] = _nothing
    doubts: Callable[[Any], Iterable[str]] = _nothing
    check_stream: Callable[[Any], object] = _nothing
    served: Callable[[Any], AbstractContextManager[object]] = contextlib.nullcontext

    @property
    def guarantee(self) -> str:
        """When a stream's messages are acknowledged, as a sentence."""
        return f"a message is acknowledged {self.acknowledges}"

    def make(self) -> Any:
        """Beam's runner."""
        return create_runner(self.beam_name or self.name)


_IN_PROCESS = "when its results are published and its rows are durable"
_BY_CHECKPOINT = "one checkpoint after the one that covers it"
_OF_FLINK = (PortableOptions, FlinkRunnerOptions, flink.FlinkStreamOptions)

RUNNERS = (
    # Beam itself would choose Prism if it finds it, and for streams a runner that acknowledges messages before it processes
    # them. Its in-memory runner is faster (BENCHMARKS.md).
    Runner(
        "DirectRunner",
        _IN_PROCESS,
        in_process=True,
        beam_name="pipeline.runners.in_memory.InMemoryRunner",
        takes=(DirectOptions,),
        check=in_memory.check,
    ),
    Runner(
        "PrismRunner",
        _IN_PROCESS,
        in_process=True,
        stream_experiments=("prism_disable_sdf_split",),  # a poller cannot be split
        takes=(PrismRunnerOptions,),
        check=prism.check,
        served=prism.running_prism,
    ),
    Runner(
        "FlinkRunner",
        _BY_CHECKPOINT,
        beam_name="pipeline.runners.flink.FlinkRunner",
        takes=_OF_FLINK,
        finalizes_early=True,
        check_stream=flink.check_stream,
        end_stream=operator.methodcaller("stop"),
        job_of=flink.job_of,
        attached=flink.attached,
        needs=("--job_endpoint or --flink_job_server_jar",),
    ),
    Runner(
        "PortableRunner", _BY_CHECKPOINT, finalizes_early=True, takes=(*_OF_FLINK, SparkRunnerOptions), needs=("--job_endpoint",)
    ),
    Runner(
        "SparkRunner",
        takes=(PortableOptions, SparkRunnerOptions),
        # https://beam.apache.org/documentation/runners/capability-matrix/: neither of the two works on Spark
        no_stream="Spark has no bundle finalization and cannot resume an unbounded source; it runs batch jobs only",
        needs=("--job_endpoint",),
    ),
    Runner(
        "DataflowRunner",
        "when the runner's own state holds it",
        native_source=True,
        needs=("--region", "--project", "--temp_location or --staging_location"),
        check=dataflow.check,
        doubts=dataflow.doubts,
        check_stream=dataflow.check_stream,
        wait=dataflow.wait,
        end_stream=dataflow.drain,
        job_of=dataflow.job_of,
        attached=dataflow.attached,
        has_own_machines=True,
        experiments=("no_use_multiple_sdk_containers",),  # one process a worker; by default each core loads a model of its own
    ),
)


def runner_named(name: str) -> Runner:
    """The runner with a name.

    Raises:
      RunnerError: No runner has this name; the message lists all.
    """
    for runner in RUNNERS:
        if runner.name == name:
            return runner
    *others, last = (runner.name for runner in RUNNERS)
    raise RunnerError(f"runner {name}: expected {', '.join(others)} or {last}")
