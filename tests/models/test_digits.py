"""The bundled digit detector finds the digits of the sample scenes."""

import contextlib
from pathlib import Path

import pytest

from models import digits
from models.evaluate import evaluate
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_detector import load_detector
from pipeline.records import ImageRef, detection_row

SAMPLES = Path(digits.FOLDER, "samples")


@pytest.mark.slow
def test_the_bundled_detector_finds_the_digits_of_the_sample_scenes():
    with contextlib.closing(load_detector(ModelConfig("digits"), DetectConfig(score_threshold=0.01))) as detector:
        found = detector.detect([ImageRef(str(path)) for path in sorted(SAMPLES.glob("*.jpg"))])
    result = evaluate([detection_row(image) for image in found], SAMPLES / "ground_truth.json")
    assert result["images_without_row"] == 0 and result["classes_by"] == "name"
    assert result["AP50"] >= 0.9
    assert result["AP"] >= 0.75
