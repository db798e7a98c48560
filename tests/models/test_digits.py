"""The bundled digit detector: its weights and what it finds on the sample scenes."""

import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from models.digits.export import METADATA, WEIGHTS_PATH, export_digits
from models.geometry import fit_image, resize_plan, to_original
from models.metadata import read_metadata

SAMPLES = Path(WEIGHTS_PATH).parent / "samples"


@pytest.fixture(scope="session")
def digits_model(tmp_path_factory) -> str:
    """The committed weights, exported."""
    output = tmp_path_factory.mktemp("digits") / "1"
    export_digits(str(output))
    return str(output)


@pytest.fixture(scope="session")
def ground_truth() -> dict:
    return json.loads((SAMPLES / "ground_truth.json").read_text())


def rows_of(model_dir: str, images: list[dict]) -> list[dict]:
    """The rows of sample scenes, computed with the exported model and `models.geometry` alone."""
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


def test_the_committed_weights_take_at_most_five_megabytes():
    assert Path(WEIGHTS_PATH).stat().st_size <= 5_000_000


def test_the_exported_detector_describes_itself(digits_model):
    assert read_metadata(digits_model) == METADATA


def test_the_exported_detector_finds_the_digits_of_the_sample_scenes(digits_model, ground_truth):
    from models.evaluate import evaluate

    result = evaluate(rows_of(digits_model, ground_truth["images"]), ground_truth)
    assert result["images_without_row"] == 0 and result["classes_by"] == "name"
    assert result["AP50"] >= 0.9
    assert result["AP"] >= 0.75


def test_detections_lie_in_the_input_and_a_batch_gives_what_single_images_give(digits_model):
    import tensorflow as tf

    images = np.stack([cv2.resize(cv2.imread(str(path))[..., ::-1], (320, 320)) for path in sorted(SAMPLES.glob("*.jpg"))[:3]])
    model = tf.saved_model.load(digits_model)
    together = model.detect(tf.constant(images))
    assert together["num_detections"].numpy().sum() > 0
    boxes = together["boxes"].numpy()
    assert boxes.min() >= 0 and boxes.max() <= 1
    for row in range(3):
        alone = model.detect(tf.constant(images[row : row + 1]))
        np.testing.assert_array_equal(alone["classes"][0], together["classes"][row])
        np.testing.assert_allclose(alone["boxes"][0], together["boxes"][row], atol=1e-4)


def test_weights_of_another_network_are_refused_by_name(tmp_path):
    from models.digits.network import load_weights

    with np.load(WEIGHTS_PATH) as archive:
        arrays = dict(archive)
    arrays["stem/kernel"] = arrays["stem/kernel"][:2]
    del arrays["join/bias"]
    np.savez(tmp_path / "other.npz", **arrays)
    with pytest.raises(ValueError, match=r"other\.npz: .* join/bias, stem/kernel"):
        load_weights(str(tmp_path / "other.npz"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["output exists", "no weights"])
def test_export_answers_a_wrong_place_with_one_line_and_exit_code_2(case, tmp_path):
    output, weights = tmp_path / "1", WEIGHTS_PATH
    if case == "output exists":
        output.mkdir()
    else:
        weights = str(tmp_path / "absent.npz")
    command = [sys.executable, "-m", "models.digits.export", "--output", str(output), "--weights", weights]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    lines = [line for line in answer.stderr.splitlines() if line.startswith("models.digits.export: ")]
    assert len(lines) == 1 and ("absent.npz" if case == "no weights" else str(output)) in lines[0]
    assert "Traceback" not in answer.stderr


def test_help_does_not_import_tensorflow():
    code = """
import runpy, sys
sys.argv = ["models.digits.export", "--help"]
try:
    runpy.run_module("models.digits.export", run_name="__main__")
except SystemExit as end:
    assert end.code == 0
assert "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_distances_of_a_cell_decode_to_the_box_around_it():
    """Pins the grid's convention: cell (row, column) stands for the point (column + 0.5, row + 0.5) * 8."""
    import tensorflow as tf

    from models.digits.network import boxes_px, cell_centres

    np.testing.assert_array_equal(cell_centres()[11, 14], [116.0, 92.0])
    log_distances = np.zeros((1, 40, 40, 4), np.float32)
    log_distances[0, 11, 14] = np.log(np.array([16.0, 32.0, 24.0, 38.0]) / 8)  # left, top, right, bottom
    np.testing.assert_allclose(boxes_px(tf.constant(log_distances))[0, 11, 14], [100.0, 60.0, 140.0, 130.0], atol=1e-3)
