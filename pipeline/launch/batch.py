"""Launches a batch job: checks every place first, loads the model, runs the graph, then writes summary and report."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import logging
import os
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions
from apache_beam.runners.worker.statesampler import StateSampler

from pipeline import errors, graph
from pipeline.config import Config, settings
from pipeline.errors import ConfigError, InputError, RunnerError, UserError
from pipeline.figures import progress
from pipeline.figures.summary import RunFacts, Tally, summarise, to_json
from pipeline.launch.prism import prism_where_wanted
from pipeline.read.list_images import check_inputs, is_manifest, is_tfrecord, list_images
from pipeline.report.annotate import annotate
from pipeline.report.page import render_report
from pipeline.storage.files import write_file
from pipeline.storage.results import STAGING, check_output, remove_staging
from pipeline.write.write_rows import read_tally

LOCAL_RUNNERS = ("DirectRunner", "PrismRunner")
DONE, FAILED = 0, 1
_JOB_SERVER_TIMEOUT = ("--job_server_timeout", "--job-server-timeout")
_SAMPLING_MS = 20
_YEARS_SECONDS = 10 * 365 * 86_400  # Beam ends a portable job after this time (by default 300 s), though it says it doesn't


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked job, ready to run.

    Attributes:
      config: Its settings.
      options: Beam's options.
      command: The command line that made it.
      started_at: When the command started, seconds since the epoch.
    """

    config: Config
    options: PipelineOptions
    command: str
    started_at: float


def prepare(config: Config, beam_flags: Sequence[str], command: str, started_at: float) -> Job:
    """Checks flags and input before anything takes time.

    Raises:
      UserError: Something is wrong; the message says what.
    """
    config = dataclasses.replace(config, output=config.output.rstrip("/") or "/")
    options = beam_options(config, beam_flags)
    end_bundles_promptly()
    _runner(config.runner)
    FileSystems.set_options(options)
    check_inputs(config.input)
    return Job(config, options, command, started_at)


def beam_options(config: Config, beam_flags: Sequence[str]) -> PipelineOptions:
    """Beam's options: the config's, then the flags'.

    Raises:
      ConfigError: One is unknown; Beam itself would only warn.
      RunnerError: Nobody listens at the job server's endpoint.
    """
    flags = [flag for name, value in config.beam_options.items() for flag in _as_flags(name, value)] + list(beam_flags)
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False, conflict_handler="resolve")
    for options in _all_subclasses(PipelineOptions):
        if "_add_argparse_args" in vars(options):
            options._add_argparse_args(known)
    unknown = known.parse_known_args(flags)[1]
    if unknown and unknown[0].startswith("-"):
        flag = unknown[0].split("=")[0]
        raise ConfigError(f"unknown flag {flag}{_nearest_flag(flag, [name for name in known._option_string_actions if name])}")
    if unknown:
        raise ConfigError(f"unexpected argument {unknown[0]!r}; see --help")
    options = PipelineOptions([f"--runner={config.runner}", *flags])
    portable = options.view_as(PortableOptions)
    if not any(flag.startswith(_JOB_SERVER_TIMEOUT) for flag in flags):
        portable.job_server_timeout = _YEARS_SECONDS
    if portable.job_endpoint not in (None, "embed"):
        _check_reachable(portable.job_endpoint)
    return options


def end_bundles_promptly() -> None:
    """Makes local workers end their bundles up to 0.2 s sooner.

    Beam ends a bundle by joining the thread that samples which step is busy. That thread sleeps for 200 ms at a time, and no
    option sets it.
    """
    StateSampler.__init__.__defaults__ = (_SAMPLING_MS,)


def _check_reachable(endpoint: str) -> None:
    """Makes sure that a job server listens.

    Raises:
      RunnerError: None does.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as err:
        raise RunnerError(f"job_endpoint {endpoint}: expected <host>:<port> where a job server listens, but: {err}") from err


def _all_subclasses(cls: Any) -> list[Any]:
    return [found for child in cls.__subclasses__() for found in (child, *_all_subclasses(child))]


def show_plan(job: Job) -> int:
    """Prints what a run would do, and what is wrong; writes nothing."""
    config = job.config
    check_output(config.output, write=False)
    detector = load_detector(config)
    images = [pattern for pattern in config.input if not is_tfrecord(pattern)]
    uris = sorted({ref.uri for pattern in images for ref in list_images(pattern, config.output)})
    ladder = ", ".join(map(str, detector.batch_sizes))
    print(
        f"input    {len(uris)} images"
        + "".join(f"\n         {uri}" for uri in uris[:5])
        + ("\n         …" if len(uris) > 5 else "")
    )
    for pattern in config.input:
        if is_tfrecord(pattern) or is_manifest(pattern):
            print(f"         from {pattern}")
    height, width = detector.metadata.input_hw
    print(
        f"model    {detector.metadata.name} {detector.version}, {width}x{height} {detector.metadata.resize}, "
        f"{len(detector.metadata.class_names)} classes"
    )
    print(f"batches  {ladder} at {config.detect.precision}")
    print(f"runner   {config.runner}")
    print(f"output   {config.output} ({', '.join(_outputs(config))})")
    print("dry run: nothing was written")
    return DONE


def run(job: Job) -> int:
    """Runs the job; returns the exit code."""
    config, staging = job.config, f"{job.config.output}/{STAGING}{uuid.uuid4().hex[:12]}"
    check_output(config.output)
    local = config.runner in LOCAL_RUNNERS
    launched_at = time.time()
    signal.signal(signal.SIGTERM, _stop)
    try:
        with (
            detector_loading(config) if local else contextlib.nullcontext() as loading,
            prism_where_wanted(config.runner, job.options) as options,
            progress.ProgressDisplay(),
        ):
            pipeline = beam.Pipeline(runner=_runner(config.runner), options=options)
            graph.build(pipeline, config, staging)
            pipeline.run().wait_until_finish()
            detector = loading.result() if loading else None
        tally = read_tally(staging)
        if tally is None or not tally.read:
            raise InputError(f"input {', '.join(config.input)}: names no image")
        facts = RunFacts(
            job.started_at,
            detector.ready_at if detector else launched_at,
            time.time(),
            job.command,
            config.as_dict(),
            config.mode,
            config.model.path,
            detector.batch_sizes if detector else (),
        )
        return finish(config, tally, facts)
    except UserError:
        raise
    except Exception as err:
        raise_user_error_within(err)
        logging.getLogger(__name__).info("the job failed", exc_info=err)
        print(f"error: the job failed: {last_line(err)}", file=sys.stderr)
        return FAILED
    finally:
        remove_staging(config.output)


def finish(config: Config, tally: Tally, facts: RunFacts) -> int:
    """Writes summary, report and samples, and says in a few lines how it went."""
    summary = summarise(tally, facts)
    images = summary["images"]
    samples = [image for _, image in tally.samples]
    for number, image in enumerate(samples[: config.write.samples], 1):
        stem = re.sub(r"[^\w.-]+", "_", os.path.splitext(os.path.basename(image.ref.uri))[0])[:80]
        write_file(f"{config.output}/samples/{number:03d}-{stem}.jpg", annotate(image))
    examples = [row for rows in tally.dead_examples.values() for row in rows]
    report = render_report(summary, samples[: config.write.report_samples], examples)
    write_file(f"{config.output}/report.html", report.encode("utf-8", "backslashreplace"))
    write_file(f"{config.output}/summary.json", to_json(summary))
    print(
        f"{images['read']} images read: {images['detected']} detected, {images['dead']} dead, {images['skipped']} skipped; "
        f"{summary['detections']} objects; {summary['images_per_second']:.1f} images/s in {summary['wall_seconds']:.1f} s "
        f"after {summary['startup_seconds']:.1f} s of start-up"
    )
    for reason, count in summary["dead_by_reason"].items():
        print(f"  dead: {count} {reason}")
    print(f"results in {config.output}: {', '.join(_outputs(config))}")
    lost = images["read"] - images["detected"] - images["dead"] - images["skipped"]
    if lost:
        print(f"error: {lost} images have no result; this is a defect of the pipeline", file=sys.stderr)
        return FAILED
    if images["dead"] > config.max_dead_share * max(images["read"], 1):
        print(
            f"error: {images['dead']} of {images['read']} images failed, more than max_dead_share = {config.max_dead_share:g}; "
            f"see {config.output}/dead_letters",
            file=sys.stderr,
        )
        return FAILED
    return DONE


def load_detector(config: Config) -> Any:
    """The detector of this process, loaded and warm."""
    from pipeline.detect.detector import shared_detector

    return shared_detector(config.model, config.detect, graph.samples_kept(config))


@contextlib.contextmanager
def detector_loading(config: Config) -> Iterator[Future[Any]]:
    """Loads the detector of this process while the block within sets a runner up; its own error comes before what that broke."""
    with ThreadPoolExecutor(1, "load") as loader:
        loading = loader.submit(load_detector, config)
        try:
            yield loading
        except Exception:
            loading.result()
            raise


def _runner(name: str) -> Any:
    """The runner by name.

    `DirectRunner` is Beam's in-memory runner here, chosen by measurement (BENCHMARKS.md); Beam itself would prefer Prism
    where it finds it.
    """
    if name == "DirectRunner":
        from apache_beam.runners.portability.fn_api_runner import FnApiRunner

        return FnApiRunner()
    try:
        from apache_beam.runners.runner import create_runner

        return create_runner(name)
    except (ValueError, ImportError, AttributeError) as err:
        raise RunnerError(
            f"runner {name}: expected DirectRunner, PrismRunner, FlinkRunner, PortableRunner or DataflowRunner"
        ) from err


def _outputs(config: Config) -> list[str]:
    parquet, coco, samples = config.write.parquet, config.write.coco, config.write.samples
    optional = [*(["detections/*.parquet"] if parquet else []), *(["coco/"] if coco else []), *(["samples/"] if samples else [])]
    return ["report.html", "summary.json", "detections/*.jsonl", "dead_letters/*.jsonl", *optional]


def _as_flags(name: str, value: Any) -> list[str]:
    flag = "--" + name.lstrip("-")
    if isinstance(value, bool):
        return [flag] if value else []
    return [f"{flag}={element}" for element in (value if isinstance(value, list) else [value])]


def _nearest_flag(flag: str, of_beam: Sequence[str]) -> str:
    ours = ["--" + key.rsplit(".", 1)[-1].replace("_", "-") for key, _, _ in settings()]
    close = difflib.get_close_matches(flag, [*ours, *of_beam], n=1)
    return f"; did you mean {close[0]}?" if close else "; see --help"


def raise_user_error_within(err: Exception) -> None:
    """Beam's runners hand an exception back as text; one of ours, and the one of Ctrl-C, is raised again as itself."""
    if last_line(err).startswith("KeyboardInterrupt"):
        raise KeyboardInterrupt from err
    found = re.findall(r"^pipeline\.errors\.(\w+): (.*?)(?: \[while running .*)?$", str(err), re.MULTILINE)
    for name, message in found[-1:]:
        raise getattr(errors, name, UserError)(message) from err


def last_line(err: Exception) -> str:
    """The line of a runner's error that says what happened."""
    lines = [line.strip() for line in str(err).splitlines() if re.search(r"\w", line)]
    return (lines[-1] if lines else type(err).__name__)[:500]


def _stop(_signal: int, _frame: Any) -> None:
    raise KeyboardInterrupt
