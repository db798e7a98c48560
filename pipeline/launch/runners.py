"""The table of runners; no other module knows a runner by its name.

A new runner is one row here and one line in the table of docs/streaming.md; a test compares the two.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

from pipeline.beam_internals import drain_dataflow_job
from pipeline.errors import RunnerError
from pipeline.launch import dataflow, flink


def _nothing(*_: Any) -> str:
    """The default of each function of the table: there is nothing to do or to name."""
    return ""


@dataclasses.dataclass(frozen=True)
class Runner:
    """What a runner can do."""

    name: str  # its name in the config
    guarantee: str = ""  # when it acknowledges a stream's message, as a sentence; "" if it runs no streams
    # whether each step runs in the launcher's process. Then the model is loaded, images are counted and duplicates are known
    # there. Answers by request need that too, since the images of a request meet in memory
    in_process: bool = False
    native_source: bool = False  # whether a stream is read by Beam's own Pub/Sub source; else by the project's splittable DoFn
    no_stream: str = ""  # why it cannot run a stream; "" if it can
    needs: tuple[str, ...] = ()  # Beam's flags that a job on it needs; of two with `or` between them one
    # whether it starts machines by the resource hints of steps, which do not see the launcher's files
    has_own_machines: bool = False
    experiments: tuple[str, ...] = ()  # Beam's experiments for its jobs, unless the user sets the opposite
    beam_name: str = ""  # the runner's name in Beam, or the full name of its class
    # waits for the end of a job, given Beam's result; raises if the job failed
    wait: Callable[[Any], object] = operator.methodcaller("wait_until_finish")
    # makes a stream finish its work in flight, given Beam's result; for steps in other processes
    end_stream: Callable[[Any], object] = _nothing
    # whether a checkpoint also finalizes bundles that ended after it began, so that only the next checkpoint is sure to hold them
    finalizes_early: bool = False
    # checks that the runner can be reached or started, given Beam's options; raises a `RunnerError` if not
    check: Callable[[Any], object] = _nothing
    check_stream: Callable[[Any], object] = _nothing  # checks the options of a stream, and sets the defaults of all streams

    def make(self) -> Any:
        """Beam's runner."""
        from apache_beam.runners.runner import create_runner

        return create_runner(self.beam_name or self.name)


RUNNERS = (
    # Beam itself would choose Prism if it finds it, and for streams a runner that acknowledges messages before it processes
    # them. Its in-memory runner is faster.
    Runner(
        "DirectRunner",
        "a message is acknowledged when its answers are published",
        in_process=True,
        beam_name="pipeline.launch.in_memory.InMemoryRunner",
    ),
    Runner(
        "FlinkRunner",
        "a message is acknowledged at the checkpoint after the one that ends its bundle",
        beam_name="pipeline.launch.flink.FlinkRunner",
        finalizes_early=True,
        check_stream=flink.check_stream,
        end_stream=operator.methodcaller("stop"),
        needs=("--job_endpoint or --flink_job_server_jar",),
    ),
    Runner(
        "SparkRunner",
        # https://beam.apache.org/documentation/runners/capability-matrix/: neither of the two works on Spark
        no_stream="Spark has no bundle finalization and cannot resume an unbounded source; it runs batch jobs only",
        needs=("--job_endpoint",),
    ),
    Runner(
        "DataflowRunner",
        "a message is acknowledged when the runner's own state holds it",
        native_source=True,
        needs=("--region", "--project", "--temp_location or --staging_location"),
        check=dataflow.check,
        check_stream=dataflow.check_stream,
        wait=dataflow.wait,
        end_stream=drain_dataflow_job,
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
