"""The whole pipeline on one screen.

ReadImages ──> DetectObjects ──> WriteRows (detections) ─┐
    │                │                                   ├─> PublishFiles
    └─ dead letters ─┴─────────> WriteRows (dead letters)┘        read = detected + dead + skipped
                                 TallyImages ──> the figures of summary.json and report.html
"""

from __future__ import annotations

import pickle
from typing import Any

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems

from pipeline.config import Config
from pipeline.detect_objects import DetectObjects
from pipeline.read_images import ReadImages
from pipeline.records import dead_letter_row, detection_row
from pipeline.summary import Tally, TallyImages
from pipeline.write_coco import write_coco
from pipeline.write_rows import PublishFiles, WriteRows


def build(pipeline: beam.Pipeline, config: Config, staging: str) -> None:
    """Adds a batch job to a pipeline.

    Args:
      pipeline: An empty pipeline.
      config: The job.
      staging: Folder under the output for unfinished files; the job leaves its `Tally` there for `read_tally`.
    """
    read = pipeline | "ReadImages" >> ReadImages(config.input, config.read, exclude=config.output)
    found = read.images | "DetectObjects" >> DetectObjects(config.model, config.detect, samples=samples_kept(config))
    dead = (read.dead, found.dead) | "AllDeadLetters" >> beam.Flatten()

    write = config.write
    rows = found.detected | "WriteDetections" >> WriteRows(staging, "detections", detection_row, write.shards, write.parquet)
    dead_rows = dead | "WriteDeadLetters" >> WriteRows(staging, "dead_letters", dead_letter_row)
    files = [rows, dead_rows]
    if write.coco:
        shards = beam.pvalue.AsList(rows)
        once = pipeline | "CocoOnce" >> beam.Create([config.output])
        files.append(once | "WriteCoco" >> beam.FlatMap(write_coco, shards, staging, write.coco_ground_truth))
    published = files | "AllFiles" >> beam.Flatten() | "PublishFiles" >> PublishFiles(config.output)

    tally = (
        (read.listed, read.skipped, found.detected, dead)
        | "AllImages" >> beam.Flatten()
        | "TallyImages" >> beam.CombineGlobally(TallyImages(samples_kept(config)))
    )
    _ = tally | "KeepTally" >> beam.Map(_keep_tally, staging, beam.pvalue.AsList(published))


def read_tally(staging: str) -> Tally:
    """What a finished job left for its summary."""
    with FileSystems.open(f"{staging}/tally", compression_type="uncompressed") as file:
        tally: Tally = pickle.loads(file.read())  # noqa: S301  written by this very job
    return tally


def _keep_tally(tally: Tally, staging: str, _published: Any) -> None:
    with FileSystems.create(f"{staging}/tally", compression_type="uncompressed") as file:
        file.write(pickle.dumps(tally))


def samples_kept(config: Config) -> int:
    """How many images the job keeps a thumbnail of."""
    return max(config.write.samples, config.write.report_samples)
