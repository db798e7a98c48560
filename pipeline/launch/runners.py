"""What each runner can do, in one table; nothing else in the code knows a runner by its name.

A runner is added by one row here and one line in the README's table; a test holds the two against each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from pipeline.errors import ConfigError, RunnerError
from pipeline.launch import dataflow, flink, flink_options, prism


def _nowhere() -> bool:
    return False


def _is_there(_options: Any) -> None:
    """Nothing that a runner would have to find or start."""


def _wait(running: Any) -> None:
    running.wait_until_finish()


def _stays(_running: Any, _options: Any) -> str:
    """Nothing to say where the launcher waits for the job."""
    return ""


def _hears(_running: Any) -> None:
    """Nothing to do where steps hear in this process that the stream ends."""


@dataclasses.dataclass(frozen=True)
class Need:
    """What a runner needs to be told.

    Attributes:
      options: Beam options, of which one must be given.
      example: How to give it, and what it is.
      instead: Whether the machine itself has it, where no option says it.
    """

    options: tuple[str, ...]
    example: str
    instead: Callable[[], object] = _nowhere


@dataclasses.dataclass(frozen=True)
class Runner:
    """What a runner can do.

    Attributes:
      name: As the user gives it.
      acknowledges: When it acknowledges a stream's message: "a message is acknowledged …"; "" where it has none.
      in_process: Whether each step runs in the process that launches the job: the model is loaded, images are counted and
        duplicates are known there. Answers by request need that too, since the images of a request meet in memory.
      native_source: Whether a stream is read by Beam's own Pub/Sub source; else by the project's splittable puller.
      no_stream: Why it cannot run a stream; "" where it can.
      needs: What must be known before it can start.
      local_files: Whether its workers may see the files of the machine that launches.
      fits_machines: Whether it gives steps the machines that they ask for; elsewhere such a wish would only part steps that
        belong together.
      experiments: Beam's experiments that its jobs are run with, where the user does not ask for the opposite.
      stream_experiments: More of them, for streams.
      beam_name: The runner's name in Beam, or the full name of its class.
      wait: Waits for the end of a job, given what Beam calls its result; raises where that is a failure.
      end_stream: Asks a stream to finish what it has, given the same, where its steps do not hear of it in this process.
      leave: Its name for a stream, given that and Beam's options, where the launcher shall not wait for it; "" where it shall.
      finalizes_early: Whether it finalizes at a checkpoint also bundles that ended after the checkpoint began, so that only the
        next one is sure to hold them.
      check: Makes sure that what it runs on is there, given Beam's options; raises a `RunnerError` where it is not.
      check_stream: Makes sure that a stream has what it needs there, given the same, and sets what every stream wants.
      served: Keeps what it runs on alive for the length of a block, given Beam's options.
    """

    name: str
    acknowledges: str = ""
    in_process: bool = False
    native_source: bool = False
    no_stream: str = ""
    needs: tuple[Need, ...] = ()
    local_files: bool = True
    fits_machines: bool = False
    experiments: tuple[str, ...] = ()
    stream_experiments: tuple[str, ...] = ()
    beam_name: str = ""
    wait: Callable[[Any], object] = _wait
    end_stream: Callable[[Any], object] = _hears
    finalizes_early: bool = False
    leave: Callable[[Any, Any], str] = _stays
    check: Callable[[Any], object] = _is_there
    check_stream: Callable[[Any], object] = _is_there
    served: Callable[[Any], AbstractContextManager[object]] = contextlib.nullcontext

    @property
    def answers(self) -> bool:
        """Whether a stream's requests can be answered as a whole."""
        return self.in_process and not self.no_stream

    @property
    def guarantee(self) -> str:
        """What a stream's sender can count on, in a sentence."""
        return f"a message is acknowledged {self.acknowledges}"

    def make(self) -> Any:
        """Beam's runner."""
        from apache_beam.runners.runner import create_runner

        return create_runner(self.beam_name or self.name)


def _region_of_gcloud() -> object:
    """The region that Beam's Dataflow runner takes where none is given: CLOUDSDK_COMPUTE_REGION, or gcloud's configuration."""
    return runner_named("DataflowRunner").make().get_default_gcp_region()


_JOB_SERVER = Need(("job_endpoint",), "--job_endpoint <host>:<port> of a job server")
_BY_CHECKPOINT = "at the checkpoint after the one that ends its bundle"

RUNNERS = (
    # Beam itself would prefer Prism where it finds it, and for streams a runner that acknowledges before anything is processed;
    # its in-memory runner is chosen by measurement (BENCHMARKS.md)
    Runner(
        "DirectRunner",
        "when its answers are published",
        in_process=True,
        beam_name="pipeline.launch.in_memory.InMemoryRunner",
    ),
    Runner(
        "PrismRunner",
        "when its answers are published",
        in_process=True,
        stream_experiments=("prism_disable_sdf_split",),  # a puller is one turn: nothing to split
        check=prism.prism_binary,
        served=prism.prism_serving,
    ),
    Runner(
        "FlinkRunner",
        _BY_CHECKPOINT,
        beam_name="pipeline.launch.flink.FlinkRunner",
        finalizes_early=True,
        check=flink_options.say_what_is_fetched,
        check_stream=flink_options.check_stream,
        wait=flink.wait,
        end_stream=flink.end_stream,
        leave=flink.leave,
        needs=(
            Need(
                ("job_endpoint",),
                "--job_endpoint <host>:<port> of a Flink job server, or Java, with which Beam starts its own",
                lambda: shutil.which("java"),
            ),
        ),
    ),
    Runner("PortableRunner", _BY_CHECKPOINT, finalizes_early=True, needs=(_JOB_SERVER,)),
    Runner(
        "SparkRunner",
        # https://beam.apache.org/documentation/runners/capability-matrix/: neither of the two works on Spark
        no_stream="Spark has no bundle finalization and cannot resume an unbounded source; it runs batch jobs only",
        needs=(_JOB_SERVER,),
    ),
    Runner(
        "DataflowRunner",
        "when the runner's own state holds it",
        native_source=True,
        needs=(
            Need(("region",), "--region, e.g. europe-west1", _region_of_gcloud),
            Need(("project",), "--project, the Google Cloud project that pays for it"),
            Need(("temp_location", "staging_location"), "--temp_location gs://<bucket>/<folder>"),
        ),
        check=dataflow.check,
        check_stream=dataflow.check_stream,
        wait=dataflow.wait,
        end_stream=dataflow.drain,
        local_files=False,
        fits_machines=True,
        experiments=("no_use_multiple_sdk_containers",),  # one process a worker; by default each core loads a model of its own
    ),
)


def runner_named(name: str) -> Runner:
    """The table's row for a runner.

    Raises:
      RunnerError: There is none; the message names those that there are.
    """
    for runner in RUNNERS:
        if runner.name == name:
            return runner
    *others, last = (runner.name for runner in RUNNERS)
    raise RunnerError(f"runner {name}: expected {', '.join(others)} or {last}")


def check_runner(runner: Runner, options: Any) -> None:
    """Makes sure that a runner can start a job with these options.

    Raises:
      ConfigError: An option is missing.
      RunnerError: What it runs on is not there.
    """
    given = options.get_all_options()
    missing = [need for need in runner.needs if not any(given[option] for option in need.options) and not need.instead()]
    if missing:
        raise ConfigError(f"runner {runner.name}: expected {'; and '.join(need.example for need in missing)}")
    runner.check(options)
