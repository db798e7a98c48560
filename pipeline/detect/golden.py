"""Golden images: a few images inside a SavedModel, with the detections of a trusted version that a new version must repeat.

`assets.extra/golden/` has the images and `detections.jsonl`: a row for each, as a job writes it, with its thresholds.
`detect-objects golden` writes the folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from models.evaluate.agreement import compare
from models.evaluate.detection_rows import read_rows
from pipeline.config import DetectConfig
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, ImageRef, detection_row

GOLDEN = "assets.extra/golden"
ROWS = "detections.jsonl"
_TOGETHER = 4  # images in hand at once

DetectIn = Callable[[Sequence[ImageRef | EncodedImage]], Sequence[DetectedImage | DeadLetter]]
"""Detects with a version, from encoded images."""


@dataclasses.dataclass(frozen=True, slots=True)
class GoldenImage:
    """An image and its expected detections.

    Attributes:
      name: Its file.
      content: Its bytes.
      row: The expected detections, as a job writes them.
      score_threshold: Of the row; objects below it are unknown.
      iou_threshold: Of the row.
    """

    name: str
    content: bytes
    row: Mapping[str, Any]
    score_threshold: float
    iou_threshold: float


def read_golden(local: str) -> tuple[GoldenImage, ...]:
    """Reads the golden images of a SavedModel on this machine.

    Raises:
      ValueError: They are malformed; the message is one line.
      OSError: An image is missing.
    """
    folder = os.path.join(local, GOLDEN)
    rows = os.path.join(folder, ROWS)
    if not os.path.isfile(rows):
        return ()
    read_rows(rows)  # its errors name the line
    with open(rows, encoding="utf-8") as file:
        return tuple(_golden_image(folder, json.loads(line)) for line in file if line.strip())


def _golden_image(folder: str, row: Mapping[str, Any]) -> GoldenImage:
    name = str(row["image"]["uri"])
    if os.path.basename(name) != name:
        raise ValueError(f"expected names of files beside {ROWS}, got {name!r}")
    try:
        thresholds = float(row["score_threshold"]), float(row["iou_threshold"])
    except (KeyError, TypeError, ValueError) as err:
        raise ValueError(f"expected score_threshold and iou_threshold in each row of {ROWS}, not so that of {name}") from err
    with open(os.path.join(folder, name), "rb") as file:
        return GoldenImage(name, file.read(), row, *thresholds)


def disagreement(golden: Sequence[GoldenImage], detect_in: DetectIn, detect: DetectConfig) -> str | None:
    """Why a version fails its golden images, in one line; None if it passes, or has none.

    Compares only objects above the thresholds both of the row and of the job.

    Args:
      golden: The images.
      detect_in: Detects with the version.
      detect: How it runs, and the least agreement.
    """
    if not golden or not detect.min_agreement:
        return None
    expected, found = [], []
    for image, result in zip(golden, _results(golden, detect_in), strict=True):
        if isinstance(result, DeadLetter):
            return f"fails on its golden image {image.name}: {result.message}"
        least = max(detect.score_threshold, image.score_threshold)
        expected.append(_let_through(image.row, least, detect))
        found.append(_let_through(detection_row(result), least, detect))
    agreement = compare(found, expected)["agreement"]
    if agreement is None:
        return (
            "none of its golden images has an object of this job's classes and score_threshold, so they show nothing; "
            "write some with objects, or set min_agreement to 0"
        )
    if agreement >= detect.min_agreement:
        return None
    with_objects = [n for n in range(len(golden)) if expected[n]["detections"] or found[n]["detections"]]
    worst = min(with_objects, key=lambda n: compare([found[n]], [expected[n]])["agreement"])
    return (
        f"its agreement with its golden images is {agreement:.3f}, expected {detect.min_agreement} or more (min_agreement); "
        f"it differs most in {golden[worst].name}{_other_suppression(golden, detect)}"
    )


def _results(golden: Sequence[GoldenImage], detect_in: DetectIn) -> Iterator[DetectedImage | DeadLetter]:
    for first in range(0, len(golden), _TOGETHER):
        yield from detect_in([EncodedImage(ImageRef(one.name), one.content) for one in golden[first : first + _TOGETHER]])


def _let_through(row: Mapping[str, Any], score_threshold: float, detect: DetectConfig) -> dict[str, Any]:
    wanted = [
        one
        for one in row["detections"]
        if one["confidence"] >= score_threshold and (not detect.classes or one["class_name"] in detect.classes)
    ]
    if detect.labels_per_box == "several":  # golden images have the best class of each box
        best = {tuple(one["box_xyxy"]): one for one in reversed(wanted)}
        wanted = sorted(best.values(), key=lambda one: -one["confidence"])
    return {"image": row["image"], "detections": wanted[: detect.max_detections]}


def _other_suppression(golden: Sequence[GoldenImage], detect: DetectConfig) -> str:
    thresholds = {image.iou_threshold for image in golden}
    if thresholds == {detect.iou_threshold}:
        return ""
    made_at = " and ".join(map(str, sorted(thresholds)))
    return f"; they were made at iou_threshold {made_at}, this job has {detect.iou_threshold}"
