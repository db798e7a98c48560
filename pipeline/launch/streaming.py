"""Launches a streaming job: checks subscription, topics and places, loads the model, runs until told to stop, then sums up.

SIGTERM and SIGINT end intake; what is in hand is finished, published, acknowledged and archived, and the exit code is 0. A
second one ends the job at once: what was in hand will be delivered again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import DebugOptions, StandardOptions

from pipeline import graph
from pipeline.config import Config
from pipeline.errors import ConfigError, InputError, UserError
from pipeline.figures.progress import ProgressDisplay
from pipeline.figures.summary import RunFacts
from pipeline.launch.batch import (
    DONE,
    FAILED,
    Job,
    beam_options,
    end_bundles_promptly,
    finish,
    last_line,
    load_detector,
    raise_user_error_within,
)
from pipeline.launch.prism import prism_binary, prism_where_wanted
from pipeline.storage.results import check_output
from pipeline.stream.check_pubsub import check_subscription, check_topic
from pipeline.stream.intake import stop_event
from pipeline.stream.live import live_figures

_WITHOUT_ARCHIVE = "out/streaming"
_CHECKPOINTED = ("FlinkRunner", "PortableRunner")
_log = logging.getLogger(__name__)


def prepare(config: Config, beam_flags: Sequence[str], command: str, started_at: float) -> Job:
    """Checks settings, flags, subscription and topics before anything takes time.

    Raises:
      UserError: Something is wrong; the message says what.
    """
    stream = config.stream
    if len(config.input) != 1:
        raise InputError(f"expected one subscription as --input, got {len(config.input)} inputs")
    if config.runner == "DirectRunner":
        raise ConfigError(
            "runner DirectRunner: it acknowledges messages before they are answered; use PrismRunner for streaming on one machine"
        )
    if config.write.parquet or config.write.coco:
        raise ConfigError("parquet and coco are written by batch jobs only; a stream's archive is JSON Lines")
    if config.runner != "PrismRunner" and stream.answer_topic:
        raise ConfigError(
            f"answer_topic: answers by request need PrismRunner, where all runs in one process; got {config.runner}"
        )
    options = beam_options(config, beam_flags)
    end_bundles_promptly()
    options.view_as(StandardOptions).streaming = True
    options.view_as(DebugOptions).add_experiment("prism_disable_sdf_split")  # a puller is one turn, there is nothing to split
    check_subscription(config.input[0])
    check_topic(config.output)
    for name, what in ((stream.dead_letter_topic, "dead_letter_topic"), (stream.answer_topic, "answer_topic")):
        if name:
            check_topic(name, what)
    if config.runner == "PrismRunner":
        prism_binary(options)
    return Job(config, options, command, started_at)


def show_plan(job: Job) -> int:
    """Prints what a run would do; reads no message and writes nothing."""
    config, detector = job.config, load_detector(job.config)
    check_output(results_folder(config), write=False)
    print(f"input    {config.input[0]}, images under {', '.join(config.stream.allow_uri_prefix)}")
    print(f"model    {detector.metadata.name} {detector.version}")
    print(f"batches  {', '.join(map(str, detector.batch_sizes))} at {config.detect.precision}")
    print(f"runner   {config.runner}: {guarantee(config.runner)}")
    print(f"output   {config.output}; files in {results_folder(config)}")
    print("dry run: nothing was written")
    return DONE


def run(job: Job) -> int:
    """Runs until SIGTERM or SIGINT; returns the exit code."""
    config, name = job.config, uuid.uuid4().hex[:8]
    results = results_folder(config)
    check_output(results)
    if not logging.getLogger().isEnabledFor(logging.WARNING):
        logging.getLogger("pipeline").setLevel(logging.WARNING)  # that Pub/Sub is lost must be seen
    figures = live_figures(name, graph.samples_kept(config))
    local = config.runner == "PrismRunner"
    detector = load_detector(config) if local else None
    ready_at = time.time()
    try:
        with prism_where_wanted(config.runner, job.options) as options, ProgressDisplay(figures.line):
            pipeline = beam.Pipeline(runner=config.runner, options=options)
            graph.build_streaming(pipeline, config, name, results, local)
            running = pipeline.run()
            with _ending_on_signals(name):
                print(f"reading {config.input[0]}; {guarantee(config.runner)}; Ctrl-C stops", file=sys.stderr, flush=True)
                running.wait_until_finish()
    except UserError:
        raise
    except Exception as err:  # noqa: BLE001  whatever ended the job, its user gets one line
        raise_user_error_within(err)
        _log.info("the job failed", exc_info=err)
        print(f"error: the job failed: {last_line(err)}", file=sys.stderr)
        return FAILED
    if detector is None:
        return DONE  # the figures are with the runner, as Beam metrics
    ladder = detector.batch_sizes
    facts = RunFacts(job.started_at, ready_at, time.time(), job.command, config.as_dict(), config.mode, config.model.path, ladder)
    return finish(dataclasses.replace(config, output=results, max_dead_share=1.0), figures.tally(), facts)


def results_folder(config: Config) -> str:
    """Where archive, dead letters, summary and report go."""
    return config.stream.archive.rstrip("/") or _WITHOUT_ARCHIVE


def guarantee(runner: str) -> str:
    """What a runner makes sure of, in a few words."""
    if runner == "PrismRunner":
        return "a message is acknowledged when its answers are published"
    if runner in _CHECKPOINTED:
        return "a message is acknowledged at the checkpoint that holds it"
    return "a message is acknowledged when the runner's own state holds it"


@contextlib.contextmanager
def _ending_on_signals(job: str) -> Iterator[None]:
    """While this lasts, the first SIGTERM or SIGINT ends the job's intake, and the next one the process."""

    def stop(number: int, _frame: Any) -> None:
        print("stopping: finishing what is in hand", file=sys.stderr, flush=True)
        stop_event(job).set()
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
