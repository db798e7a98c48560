"""Launches a streaming job: checks subscription, topics and folders, loads the model, runs until a signal, writes the report.

The first SIGTERM or SIGINT ends the intake. The job finishes, publishes, acknowledges and archives its images in flight, and
exits with 0. A second signal ends the job at once, and Pub/Sub delivers the messages in flight again.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence

from apache_beam.options.pipeline_options import StandardOptions

from pipeline import graph
from pipeline.config import Config
from pipeline.detect.load_detector import detector_in_use
from pipeline.errors import DONE, ConfigError, InputError
from pipeline.launch.dry_run import model_lines
from pipeline.launch.execute import Elsewhere, Here, execute, place_of
from pipeline.launch.loading import load_detector, model_known, tried_here
from pipeline.launch.options import Job, checked_job
from pipeline.launch.signals import stopped_by_signals
from pipeline.log_lines import bind_run_id, say
from pipeline.outcome.conclude import Conclusion
from pipeline.results.completion import RowVersion
from pipeline.results.layout import check_output
from pipeline.results.run_folder import Run
from pipeline.runners.table import RUNNERS, runner_named
from pipeline.stats.job_stats import JobStats
from pipeline.stats.progress import in_background
from pipeline.stream.check_pubsub import check_subscription, check_topic
from pipeline.stream.shared import RunSettings, opened, run_of
from pipeline.stream.undelivered import keep_looking
from pipeline.worker import WorkerContext

_WITHOUT_ARCHIVE = "out/streaming"


def prepare(config: Config, beam_flags: Sequence[str], command: str, started_at: float, *, wait: bool = True) -> Job:
    """Checks settings, flags, subscription and topics.

    Raises:
      UserError: One of them is wrong.
    """
    _check_settings(config)
    job = checked_job(config, beam_flags, command, started_at, wait=wait)
    if job.runner.in_process and not job.in_process:
        raise ConfigError(f"direct_running_mode: a stream on {job.runner.name} runs in one process; leave the flag out")
    job.options.view_as(StandardOptions).streaming = True
    source = check_subscription(config.input[0])
    check_topic(config.output, "output", source)
    for what in ("dead_letter_topic", "answer_topic"):
        if name := getattr(config.stream, what):
            check_topic(name, what, source)
    return job


def _check_settings(config: Config) -> None:
    if len(config.input) != 1:
        raise InputError(f"expected one subscription as --input, got {len(config.input)} inputs")
    runner = runner_named(config.runner)
    if runner.no_stream:
        raise ConfigError(f"runner {runner.name}: {runner.no_stream}")
    if config.stream.answer_topic and not runner.in_process:
        able = " or ".join(other.name for other in RUNNERS if other.in_process)
        raise ConfigError(f"answer_topic: answers by request need {able}, where all runs in one process; got {runner.name}")


def show_plan(job: Job) -> int:
    """Prints the plan of a run; reads no message and writes nothing."""
    config = job.config
    detector, tried_as = tried_here(job)
    check_output(results_folder(config), write=False)
    say([f"input    {config.input[0]}, images under {', '.join(graph.allowed_prefixes(config))}"])
    say(model_lines(detector, tried_as))
    say(f"warning  {doubt}" for doubt in job.runner.doubts(job.options))
    say([f"runner   {job.runner.name}: {job.runner.guarantee}", f"output   {config.output}; files in {results_folder(config)}"])
    say(["dry run: nothing was written"])
    return DONE


def run(job: Job) -> int:
    """Runs until SIGTERM or SIGINT, and waits for the end if it is to; returns the exit code."""
    config, results = job.config, results_folder(job.config)
    check_output(results)
    this_run = Run.new(results)
    bind_run_id(this_run.name)
    with stopped_by_signals(results):
        place = place_of(job, this_run)
        end = Conclusion(this_run, place.facts)
        settings = _settings(job, this_run, end, place.context)
        return execute(
            place,
            end,
            lambda empty: graph.build_streaming(empty, config, settings, native_source=job.runner.native_source),
            around=functools.partial(_around, settings, place, end),
            loading=functools.partial(_loaded, config) if job.in_process else contextlib.nullcontext,
            stop=functools.partial(_end_intake, settings),
            begun=f"reading {config.input[0]}; {job.runner.guarantee}; Ctrl-C stops",
        )


@contextlib.contextmanager
def _around(settings: RunSettings, place: Here | Elsewhere, end: Conclusion, stats: Callable[[], JobStats]) -> Iterator[None]:
    """Keeps what the steps in this process share, and asks for the messages that nobody has received."""
    config = place.job.config
    with opened(settings, place.renewing(end, stats)) if isinstance(place, Here) else contextlib.nullcontext():
        if config.monitoring.metrics_port is None or "PUBSUB_EMULATOR_HOST" in os.environ:
            yield
            return
        with in_background("undelivered", functools.partial(keep_looking, config.input[0])):
            yield


@contextlib.contextmanager
def _loaded(config: Config) -> Iterator[None]:
    load_detector(config)
    yield


def _end_intake(settings: RunSettings) -> None:
    """Ends what waits in this process."""
    if settings.in_process:
        run_of(settings).threads.stop.set()
        if detector := detector_in_use(graph.detector_spec(settings.config)):
            detector.stop_waiting()


def _settings(job: Job, run: Run, end: Conclusion, context: WorkerContext | None) -> RunSettings:
    return RunSettings(
        run.name,
        job.config,
        results=run.output,
        began=run.began,
        version=RowVersion.of(job.config.as_dict(), model_known(job)),
        finalizes_early=job.runner.finalizes_early,
        worker_context=context,
        end=end,
    )


def results_folder(config: Config) -> str:
    """The folder of archive, dead letters, summary and report."""
    return config.stream.archive.rstrip("/") or _WITHOUT_ARCHIVE
