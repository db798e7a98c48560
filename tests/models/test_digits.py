"""The bundled digit detector: what it is and what it finds on the sample scenes."""

import contextlib
from pathlib import Path

from models import digits
from models.evaluate import evaluate
from models.metadata import DetectorMetadata, read_metadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_detector import load_detector
from pipeline.records import ImageRef, detection_row

SAMPLES, MODEL = Path(digits.FOLDER, "samples"), Path(digits.FOLDER, "1")
METADATA = DetectorMetadata("digits", (320, 320), "letterbox", tuple("0123456789"))


def test_the_bundled_model_takes_at_most_three_megabytes():
    files = [path for path in MODEL.rglob("*") if path.is_file() and ".openvino" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 3_000_000


def test_the_bundled_detector_describes_itself():
    assert read_metadata(str(MODEL)) == METADATA


def test_the_bundled_detector_finds_the_digits_of_the_sample_scenes():
    with contextlib.closing(load_detector(ModelConfig("digits"), DetectConfig(score_threshold=0.01))) as detector:
        found = detector.detect([ImageRef(str(path)) for path in sorted(SAMPLES.glob("*.jpg"))])
    result = evaluate([detection_row(image) for image in found], SAMPLES / "ground_truth.json")
    assert result["images_without_row"] == 0 and result["classes_by"] == "name"
    assert result["AP50"] >= 0.9
    assert result["AP"] >= 0.75
