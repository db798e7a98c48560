"""The whole pipeline on one screen: every step of a batch job and of a stream.

ReadImages ──> DetectObjects ── detected ──┐                                                                  a batch job
    │                │                     ├──> Results ──> WriteShards ──> Conclude
    ├────────────────┴─ dead letters ──────┤
    └─ counted ────────────────────────────┘        read = detected + dead + skipped

ReadMessages ──> ParseMessages ──> AddIdentity ──> DropDuplicates ──> DetectObjects ──> PublishResults        a stream
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import apache_beam as beam

from pipeline.config import Config
from pipeline.detect.detect_objects import DetectObjects
from pipeline.detect.load_detector import DetectorSpec, shared_detector
from pipeline.detect.load_model import name_and_version
from pipeline.listing.dead_letter_replay import DeadLetterReplay
from pipeline.listing.done_rows import DoneRows
from pipeline.listing.read_images import ReadImages
from pipeline.monitoring.watchdog import watch_worker
from pipeline.outcome.conclude import Conclusion, conclude
from pipeline.outcome.write_shards import Results, WriteShards
from pipeline.results.completion import RowVersion
from pipeline.results.run_folder import Run
from pipeline.stats.samples import REPORT_SAMPLES
from pipeline.stream.archive import ArchiveRows
from pipeline.stream.deduplicate import AddIdentity, DropDuplicates, DropDuplicatesInState
from pipeline.stream.messages import replay_message
from pipeline.stream.pubsub import ReadMessages
from pipeline.stream.shared import RunSettings
from pipeline.stream.steps import ParseMessages, PublishResults
from pipeline.worker import WorkerContext


def build(
    pipeline: beam.Pipeline, config: Config, source: ReadImages, sink: WriteShards, end: Conclusion, *, lazily: bool = False
) -> None:
    """Adds a batch job to an empty pipeline; `lazily`, the first image loads the model: perhaps there is nothing to do."""
    read = pipeline | "ReadImages" >> source
    spec = detector_spec(config)
    detect = DetectObjects(spec, lazily=lazily)
    found = read.images | "DetectObjects" >> detect.with_resource_hints(**machine_hints(config))
    stats = Results(found.detected, (read.dead, found.dead), read.counted) | sink
    _ = stats | "Conclude" >> beam.Map(conclude, end, spec)


def detector_spec(config: Config) -> DetectorSpec:
    """What detects in a job's images."""
    return DetectorSpec(config.model, config.detect, samples_kept(config), config.read)


def worker_context(config: Config, run: Run) -> WorkerContext:
    """What the workers of a job that is launched now must reach, if they run outside its launcher's process."""
    watch = functools.partial(watch_worker, config.monitoring.stuck_after_s)
    return WorkerContext(run, functools.partial(name_and_version, config.model, config.detect.engine), watch)


def source_of(config: Config, done: DoneRows | None = None, worker_context: WorkerContext | None = None) -> ReadImages:
    """The source of a batch job's images, without those that are done; with a context, workers elsewhere read."""
    return ReadImages(
        config.all_patterns(),
        config.read,
        exclude=config.output,
        allowed=config.stream.allow_uri_prefix,
        done=done,
        again=dead_letter_replay(config) if config.retry_dead else None,
        worker_context=worker_context,
        max_megapixels=config.detect.max_megapixels,
        rebalance=worker_context is not None,  # one process needs no rebalancing
    )


def dead_letter_replay(config: Config) -> DeadLetterReplay:
    """How the dead letters of a results folder are tried again."""
    return DeadLetterReplay(config.replayed, config.stream.allow_uri_prefix, replay_message, config.again)


def sink_of(config: Config, run: Run, version: RowVersion, worker_context: WorkerContext | None = None) -> WriteShards:
    """Writes a batch job's results, and gives their statistics."""
    return WriteShards(run, version, config.write, samples_kept(config), worker_context)


def build_streaming(pipeline: beam.Pipeline, config: Config, run: RunSettings, *, native_source: bool = False) -> None:
    """Adds a streaming job to an empty pipeline, with Beam's own Pub/Sub source or the project's splittable DoFn.

    If its steps are not all in one process, the runner's durable state finds duplicates.
    """
    messages = pipeline | "ReadMessages" >> ReadMessages(run, native_source)
    parsing = beam.ParDo(ParseMessages(allowed_prefixes(config), run)).with_outputs("dead", main="images")
    asked = messages | "ParseMessages" >> parsing
    dropping = DropDuplicates(run) if run.in_process else DropDuplicatesInState(run)
    spec = detector_spec(config)
    naming = beam.ParDo(AddIdentity(run, functools.partial(shared_detector, spec)))
    new = asked.images | "AddIdentity" >> naming | "DropDuplicates" >> beam.ParDo(dropping)
    detect = DetectObjects(spec)
    found = new | "DetectObjects" >> detect.with_resource_hints(**machine_hints(config))

    publishing = beam.ParDo(PublishResults(run))
    _ = asked.dead | "PublishRefused" >> publishing
    _ = found.dead | "PublishUndetected" >> publishing
    _ = found.detected | "PublishDetections" >> publishing

    if not run.in_process:  # in one process `PublishResults` hands them to the archive
        rows = (asked.dead, found.dead, *((found.detected,) if config.stream.archive else ()))
        _ = rows | "ArchiveRows" >> ArchiveRows(run.writer, config.write.window_s, run.end)


def allowed_prefixes(config: Config) -> Sequence[str]:
    """The folders whose images a message of a stream may name."""
    return config.stream.allow_uri_prefix or ("gs://",)


def samples_kept(config: Config) -> int:
    """The number of images whose thumbnails the job keeps."""
    return max(config.write.samples, REPORT_SAMPLES)


def machine_hints(config: Config) -> dict[str, str]:
    """Beam's resource hints of `DetectObjects`, whose machines also read and decode the images.

    https://cloud.google.com/dataflow/docs/guides/right-fitting
    """
    return {"accelerator": config.worker.accelerator} if config.worker.accelerator else {}
