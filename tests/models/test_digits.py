"""The bundled digit detector: what it is and what it finds on the sample scenes."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from models import digits
from models.geometry import fit_image, resize_plan, to_original
from models.metadata import DetectorMetadata, read_metadata

SAMPLES, MODEL = Path(digits.FOLDER, "samples"), Path(digits.FOLDER, "1")
METADATA = DetectorMetadata("digits", (320, 320), "letterbox", tuple("0123456789"))


@pytest.fixture(scope="session")
def ground_truth() -> dict:
    return json.loads((SAMPLES / "ground_truth.json").read_text())


def rows_of(model_dir: str, images: list[dict]) -> list[dict]:
    """The rows of sample scenes, computed with the model and `models.geometry` alone."""
    import tensorflow as tf

    model, rows = tf.saved_model.load(model_dir), []
    for image in images:
        plan = resize_plan((image["width"], image["height"]), METADATA.input_hw, METADATA.resize)
        pixels = cv2.imread(str(SAMPLES / image["file_name"]), cv2.IMREAD_COLOR_RGB)  # upright, by its EXIF orientation
        fitted = fit_image(pixels, plan, METADATA.input_hw)[None]
        found = model.detect(tf.constant(fitted), tf.constant(0.01), tf.constant(0.45), tf.constant(100))
        boxes = to_original(found["boxes"][0].numpy() * np.array(METADATA.input_hw[::-1] * 2), plan).tolist()
        columns = zip(boxes, found["classes"][0].numpy().tolist(), found["scores"][0].numpy().tolist(), strict=True)
        detections = [
            {"box_xyxy": box, "class_id": class_id, "class_name": METADATA.class_names[class_id], "confidence": score}
            for box, class_id, score in list(columns)[: int(found["num_detections"][0])]
        ]
        rows.append({"image": {"uri": image["file_name"]}, "detections": detections})
    return rows


def test_the_samples_are_small_and_varied(ground_truth):
    files = sorted(path.name for path in SAMPLES.glob("*.jpg"))
    assert files == [image["file_name"] for image in ground_truth["images"]] and len(files) == 24
    assert sum(path.stat().st_size for path in SAMPLES.iterdir()) < 1_500_000
    assert any(image["height"] > image["width"] for image in ground_truth["images"])
    with_digits = {a["image_id"] for a in ground_truth["annotations"]}
    assert len(with_digits) == 22
    orientations = [Image.open(SAMPLES / name).getexif().get(0x0112, 1) for name in files]
    assert sorted(orientations) == [1] * 20 + [6, 6, 8, 8]


def test_the_bundled_model_takes_at_most_three_megabytes():
    assert sum(path.stat().st_size for path in MODEL.rglob("*") if path.is_file()) <= 3_000_000


def test_the_bundled_detector_describes_itself():
    assert read_metadata(str(MODEL)) == METADATA


def test_the_bundled_detector_finds_the_digits_of_the_sample_scenes(ground_truth):
    from models.evaluate import evaluate

    result = evaluate(rows_of(str(MODEL), ground_truth["images"]), ground_truth)
    assert result["images_without_row"] == 0 and result["classes_by"] == "name"
    assert result["AP50"] >= 0.9
    assert result["AP"] >= 0.75
