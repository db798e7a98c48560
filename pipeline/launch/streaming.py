"""Launches a streaming job: checks subscription, topics and folders, loads the model, runs until a signal, writes the report.

The first SIGTERM or SIGINT ends the intake. The job finishes, publishes, acknowledges and archives its images in flight, and
exits with 0. A second signal ends the job at once, and Pub/Sub delivers the messages in flight again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Sequence

from apache_beam.options.pipeline_options import StandardOptions

from pipeline import graph
from pipeline.config import Config
from pipeline.detect.detector import Detector
from pipeline.errors import DONE, ConfigError, InputError
from pipeline.launch.dry_run import model_lines
from pipeline.launch.finalize import JobReport, clean_up, finished_by_signals, stopped_by_signals, submitting
from pipeline.launch.loading import is_elsewhere, load_detector, model_known, tried_here
from pipeline.launch.options import CANARY_SECONDS, Job, checked_job
from pipeline.launch.runners import RUNNERS, runner_named
from pipeline.log_lines import bind_run_id, console, say
from pipeline.monitoring.monitor import monitored
from pipeline.results.completion import RowVersion
from pipeline.results.layout import check_output
from pipeline.results.run import Run
from pipeline.stats.process import PROCESS
from pipeline.stats.progress import in_background
from pipeline.stats.worker_reports import WorkerReports
from pipeline.stream.check_pubsub import check_subscription, check_topic
from pipeline.stream.run import RunSettings, opened
from pipeline.stream.undelivered import keep_looking

_WITHOUT_ARCHIVE = "out/streaming"


def prepare(config: Config, beam_flags: Sequence[str], command: str, started_at: float) -> Job:
    """Checks settings, flags, subscription and topics.

    Raises:
      UserError: One of them is wrong.
    """
    _check_settings(config)
    job = checked_job(config, beam_flags, command, started_at)
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
    detector = None if is_elsewhere(job) else load_detector(tried_here(job))
    check_output(results_folder(config), write=False)
    say([f"input    {config.input[0]}, images under {', '.join(graph.allowed_prefixes(config))}"])
    say(model_lines(detector, tried_here(job)))
    say(f"warning  {doubt}" for doubt in job.runner.doubts(job.options))
    say([f"runner   {job.runner.name}: {job.runner.guarantee}", f"output   {config.output}; files in {results_folder(config)}"])
    say(["dry run: nothing was written"])
    return DONE


def run(job: Job) -> int:
    """Runs until SIGTERM or SIGINT; returns the exit code."""
    config, runner = job.config, job.runner
    results = results_folder(config)
    check_output(results)
    this_run = Run.new(results)
    bind_run_id(this_run.name)
    settings = _settings(job, this_run)
    with stopped_by_signals(results), this_run.opened(outlives=not runner.in_process), PROCESS.counting() as counted:
        with opened(settings) as stream, runner.served(job.options), contextlib.ExitStack() as shown:
            reports = WorkerReports(this_run, graph.samples_kept(config), streaming=True)
            stats = functools.partial(PROCESS.stats_of, counted) if job.in_process else reports.now
            shown.enter_context(monitored(config, stats))
            shown.enter_context(reports.naming_failures())
            if config.monitoring.metrics_port is not None and "PUBSUB_EMULATOR_HOST" not in os.environ:
                shown.enter_context(in_background("undelivered", functools.partial(keep_looking, config.input[0])))
            model = load_detector(config) if job.in_process else reports
            ready_at = time.time()
            pipeline = job.pipeline()
            graph.build_streaming(pipeline, config, settings, native_source=runner.native_source)
            running = None

            def end() -> None:
                stream.threads.stop.set()
                if isinstance(model, Detector):
                    model.stop_waiting()
                if running:
                    runner.end_stream(running)

            with finished_by_signals(end):
                with submitting(job.runner.name):
                    running = pipeline.run()
                console.info("reading %s; %s; Ctrl-C stops", config.input[0], runner.guarantee)
                runner.wait(running)
        with finished_by_signals(lambda: None):  # the summary will be there in a moment
            of_model, facts = model.model_stats(CANARY_SECONDS), job.done(ready_at)
            if not job.in_process and not reports.at_the_end():
                console.info("no worker has reported its figures to this launcher; the runner has them, as Beam metrics")
                return DONE
            ended = stats()
            ended.take_model(of_model)
            facts = facts if job.in_process else facts.elsewhere(ended.began)
            code = JobReport(this_run, config.write).finish(ended, facts)
            clean_up(results)
            return code


def _settings(job: Job, run: Run) -> RunSettings:
    return RunSettings(
        run.name,
        job.config,
        in_process=job.runner.in_process,
        results=results_folder(job.config),
        began=run.began,
        version=RowVersion.of(job.config.as_dict(), model_known(job)),
        finalizes_early=job.runner.finalizes_early,
        worker_context=None if job.runner.in_process else graph.worker_context(job.config, run),
    )


def results_folder(config: Config) -> str:
    """The folder of archive, dead letters, summary and report."""
    return config.stream.archive.rstrip("/") or _WITHOUT_ARCHIVE
