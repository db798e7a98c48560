"""ResultsFolder folders for tests: writes shards without a job, and reads the rows of a folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.records import DeadLetter, DetectedImage, Detections, ImageRef, row_bytes
from pipeline.results.completion import RowVersion
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.reader import ResultsFolder
from pipeline.results.rows import dead_letters_table, detections_table, json_rows
from pipeline.results.shards import write_shard

VERSION = RowVersion("yolo", "7", "ab12cd34", "cd34ab12")
OTHER = VERSION._replace(version="8")


def detected(uri: str, generation: str = "1", confidence: float = 0.5, *, version: RowVersion = VERSION) -> DetectedImage:
    """A detected image with one object."""
    boxes = np.array([[1.0, 2.0, 30.5, 40.25]], np.float32)
    found = Detections(boxes, np.array([3], np.int32), np.array([confidence], np.float32), ("cat",))
    return DetectedImage(ImageRef(uri, generation), 640, 480, version.model, version.version, found)


def failed(uri: str, generation: str = "1", *, stage: str = "decode", reason: str = "not_an_image") -> DeadLetter:
    """A dead letter of an image."""
    return DeadLetter(ImageRef(uri, generation), stage, reason, "expected an image")


def json_row(uri: str, *found: tuple[list[float], int, str, float], wh: tuple[int, int] = (100, 50)) -> dict[str, Any]:
    """A row of detections as exports get it, of an image with these boxes, class ids, class names and confidences."""
    names = ("box_xyxy", "class_id", "class_name", "confidence")
    return {
        "image": {"uri": uri, "generation": "1", "width": wh[0], "height": wh[1]},
        "model": {"name": "m", "version": "7"},
        "detections": [dict(zip(names, each, strict=True)) for each in found],
    }


def write_rows(
    output: str,
    images: Sequence[DetectedImage] = (),
    letters: Sequence[DeadLetter] = (),
    *,
    version: RowVersion = VERSION,
    run: str = "0a1b2c3d",
    made_at: float | None = None,
) -> list[str]:
    """Writes a shard of each kind that has rows; returns their paths."""
    made_at = time.time() if made_at is None else made_at
    paths = []
    if images:
        images = sorted(images, key=lambda image: image.ref.uri)
        paths.append(write_shard(output, DETECTIONS, detections_table(images, version, run, made_at), run))
    if letters:
        paths.append(write_shard(output, DEAD_LETTERS, dead_letters_table(letters, version, run, made_at), run))
    return paths


def rows_in(output: str, kind: str = DETECTIONS) -> list[dict[str, Any]]:
    """The rows of a kind in a results folder, as its shards have them, sorted by image."""
    rows = [row for _, batch in ResultsFolder(output, (kind,)).batches() for row in json_rows(batch, kind)]
    return sorted(rows, key=row_bytes)
