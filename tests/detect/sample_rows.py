"""The rows that a model gives for images, by default for the samples of the bundled detector: equal on all engines."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import DetectConfig
from pipeline.records import EncodedImage, ImageRef, detection_row
from tests.fixtures import REPO
from tests.tiny_models import detected

SAMPLES = sorted((REPO / "models" / "digits" / "samples").glob("*.jpg"))


def rows(
    path: str, files: Sequence[Path] = SAMPLES, model: Mapping[str, Any] | None = None, **detect: Any
) -> list[dict[str, Any]]:
    """The rows of images, with these settings of the model and of detection."""
    images = [EncodedImage(ImageRef(file.name), file.read_bytes()) for file in files]
    results, _ = detected(path, images, DetectConfig(**detect), **(model or {}))
    return [detection_row(found) for found in results]


def check_equal(found: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]], more_than: int) -> None:
    """Compares the objects of rows, of which there are more than so many, to 0.02 pixels."""
    assert sum(len(row["detections"]) for row in expected) > more_than
    for row, other in zip(found, expected, strict=True):
        objects, wanted = (
            [(one["class_id"], *one["box_xyxy"], one["confidence"]) for one in each["detections"]] for each in (row, other)
        )
        assert [one[0] for one in objects] == [one[0] for one in wanted]
        np.testing.assert_allclose(objects, wanted, atol=0.02)
