"""The whole pipeline on one screen.

ReadImages ──> DetectObjects ──> SpoolRows (detections) ──┐
    │                │                                    ├──> WriteResults: files, and the figures of the summary
    ├─ dead letters ─┴─────────> SpoolRows (dead letters)─┤
    └─ counted ───────────────────────────────────────────┘        read = detected + dead + skipped
"""

from __future__ import annotations

import functools

import apache_beam as beam

from pipeline.config import Config
from pipeline.detect.detect_objects import DetectObjects
from pipeline.read.read_images import ReadImages
from pipeline.records import dead_letter_row, detection_row
from pipeline.storage.results import DEAD_LETTERS, DETECTIONS
from pipeline.stream.deduplicate import DropDuplicates, DropDuplicatesInState
from pipeline.stream.messages import MessageLimits
from pipeline.stream.pubsub import ReadMessages, ReadNative
from pipeline.stream.steps import ArchiveRows, ParseMessages, PublishResults, ReadRequested, Topics
from pipeline.write.write_rows import SpoolRows, WriteResults


def build(pipeline: beam.Pipeline, config: Config, staging: str) -> None:
    """Adds a batch job to a pipeline.

    Args:
      pipeline: An empty pipeline.
      config: The job.
      staging: Folder under the output for unfinished files; the job leaves its `Tally` there for `write_rows.read_tally`.
    """
    samples, shards = samples_kept(config), config.write.shards
    read = pipeline | "ReadImages" >> ReadImages(config.input, config.read, exclude=config.output)
    found = read.images | "DetectObjects" >> DetectObjects(config.model, config.detect, samples=samples)

    detections = found.detected | "SpoolDetections" >> SpoolRows(staging, DETECTIONS, detection_row, shards, samples)
    unread = read.dead | "SpoolUnread" >> SpoolRows(staging, DEAD_LETTERS, dead_letter_row)
    undetected = found.dead | "SpoolUndetected" >> SpoolRows(staging, DEAD_LETTERS, dead_letter_row)

    spooled = (detections, unread, undetected, read.counted)
    _ = spooled | "WriteResults" >> WriteResults(config.output, staging, config.write, samples)


def build_streaming(
    pipeline: beam.Pipeline, config: Config, job: str, results: str, *, in_process: bool, native_source: bool = False
) -> None:
    """Adds a streaming job to a pipeline.

    Args:
      pipeline: An empty pipeline.
      config: The job.
      job: Names this run: its stop event, its figures, its archive files.
      results: Folder of the archive and the dead letters.
      in_process: Whether every step runs in this process; else duplicates are dropped in the runner's durable state.
      native_source: Whether the runner reads with Beam's own Pub/Sub source; else with the project's puller.
    """
    stream, deadline_s = config.stream, config.stream.answer_deadline_s if config.stream.answer_topic else None
    limits = MessageLimits(stream.allow_uri_prefix, stream.max_message_images, int(stream.max_message_mb * 1e6))
    topics = Topics(config.output, stream.dead_letter_topic, stream.answer_topic)
    pulled = ReadMessages(config.input[0], job, stream.pull_images, int(stream.pull_mb * 1e6))

    messages = pipeline | "ReadMessages" >> (ReadNative(config.input[0]) if native_source else pulled)
    asked = messages | "ParseMessages" >> ParseMessages(limits, job, deadline_s)
    read = asked.images | "ReadImages" >> ReadRequested(config.read)
    if in_process:
        new, repeats = read.images | "DropDuplicates" >> DropDuplicates(job, stream.deduplicate_s)
        _ = repeats | "PublishRepeats" >> PublishResults(topics, job, deadline_s)
    else:
        new = read.images | "DropDuplicates" >> DropDuplicatesInState(stream.deduplicate_s)
    found = new | "DetectObjects" >> DetectObjects(config.model, config.detect, samples=samples_kept(config))

    _ = asked.dead | "PublishRefused" >> PublishResults(topics, job, deadline_s)
    _ = read.dead | "PublishUnread" >> PublishResults(topics, job, deadline_s)
    _ = found.dead | "PublishUndetected" >> PublishResults(topics, job, deadline_s)
    _ = found.detected | "PublishDetections" >> PublishResults(topics, job, deadline_s)

    archive = functools.partial(ArchiveRows, results, window_s=stream.archive_window_s, job=job, shards=config.write.shards)
    _ = (asked.dead, read.dead, found.dead) | "ArchiveDeadLetters" >> archive("dead_letters", dead_letter_row)
    if stream.archive:
        _ = found.detected | "ArchiveDetections" >> archive("detections", detection_row)


def samples_kept(config: Config) -> int:
    """How many images the job keeps a thumbnail of."""
    return max(config.write.samples, config.write.report_samples)
