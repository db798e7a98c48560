"""The bundled digit detector: its scenes, its ground truth, its weights and what it finds on the sample scenes."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from models.digits.export import METADATA, WEIGHTS_PATH, export_digits
from models.digits.training.ink import SPLITS, InkStyle, load_digit_images, render_digit
from models.digits.training.pages import compose_page
from models.digits.training.scenes import compose_scene
from models.digits.training.write_scenes import coco_ground_truth, compose_sample, encode_jpeg, write_scenes
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


def test_the_same_seed_and_index_give_the_same_scene():
    first, second = compose_scene("test", 3, 5), compose_scene("test", 3, 5)
    np.testing.assert_array_equal(first.image, second.image)
    np.testing.assert_array_equal(first.boxes_xyxy, second.boxes_xyxy)
    np.testing.assert_array_equal(first.labels, second.labels)


@pytest.mark.parametrize("other", [("test", 3, 6), ("test", 4, 5), ("train", 3, 5)], ids=["index", "seed", "split"])
def test_another_index_seed_or_split_gives_another_scene(other):
    first, second = compose_scene("test", 3, 5), compose_scene(*other)
    assert first.image.shape != second.image.shape or (first.image != second.image).any()


def test_no_digit_image_is_in_two_splits_and_none_is_left_out():
    ranges = sorted(SPLITS.values())
    assert ranges[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert sum(len(load_digit_images(split).labels) for split in SPLITS) == 1797
    images = {split: {image.tobytes() for image in load_digit_images(split).images} for split in SPLITS}
    assert not images["train"] & images["test"]
    assert not images["train"] & images["validation"]
    assert not images["validation"] & images["test"]


@pytest.mark.parametrize("index", range(12))
def test_ground_truth_boxes_lie_in_the_image_and_do_not_cover_each_other(index):
    scene = compose_scene("validation", 11, index)
    height, width = scene.image.shape[:2]
    left, top, right, bottom = scene.boxes_xyxy.T
    assert (left >= 0).all() and (top >= 0).all() and (right <= width).all() and (bottom <= height).all()
    assert (right > left).all() and (bottom - top >= 8).all()
    assert ((scene.labels >= 0) & (scene.labels <= 9)).all() and len(scene.labels) == len(scene.boxes_xyxy)
    for i, a in enumerate(scene.boxes_xyxy):
        for b in scene.boxes_xyxy[:i]:
            shared = np.clip(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0, None).prod()
            assert shared <= 0.02 * min((a[2:] - a[:2]).prod(), (b[2:] - b[:2]).prod())


@pytest.mark.parametrize("rotation_deg", [-25, 0, 25])
def test_a_rendered_digit_has_ink_on_all_four_edges_of_its_box(rotation_deg):
    style = InkStyle(90.0, 1.0, rotation_deg, shear=0.1, threshold=0.5, softness=0.1, wobble_px=0.2)
    digits = load_digit_images("test")
    for source in digits.images[:20]:
        alpha = render_digit(source, style, np.random.default_rng(0))
        assert all(edge.max() >= 0.5 for edge in (alpha[0], alpha[-1], alpha[:, 0], alpha[:, -1]))
        assert 60 <= max(alpha.shape) <= 160


def test_a_positive_rotation_turns_ink_counter_clockwise():
    bar = np.zeros((8, 8), np.float32)
    bar[:, 3:5] = 1.0
    alpha = render_digit(bar, InkStyle(80.0, 1.0, 20.0, 0.0, 0.5, 0.1, 0.0), np.random.default_rng(0))
    top, bottom = (np.flatnonzero(row >= 0.5).mean() for row in (alpha[1], alpha[-2]))
    assert top < bottom - 10


def test_what_a_scene_adds_to_its_page_is_inside_the_boxes():
    """But for noise, blur and the faintest edge of the ink."""
    scene = compose_scene("test", 1, 4, with_digits=True)
    rng = np.random.default_rng([1, 4])
    width, height = (int(side) for side in rng.integers(480, 901, 2))
    page = compose_page(width, height, "test", rng)
    assert scene.image.shape == page.shape
    inside = np.zeros(page.shape[:2], bool)
    for left, top, right, bottom in scene.boxes_xyxy.astype(int):
        inside[top:bottom, left:right] = True
    change = np.abs(scene.image.astype(int) - page).mean(axis=-1)
    assert change[inside].mean() > 2 * change[~inside].mean() + 5


def test_a_scene_without_digits_has_zero_boxes():
    scene = compose_scene("test", 1, 0, with_digits=False)
    assert scene.boxes_xyxy.shape == (0, 4) and scene.labels.shape == (0,)


@pytest.mark.parametrize("orientation", [1, 6, 8])
def test_a_turned_jpeg_is_upright_again_for_whoever_obeys_its_exif_orientation(orientation, tmp_path):
    upright = np.zeros((48, 80, 3), np.uint8)
    upright[:16, :24, 0] = 250  # red in the upper left corner
    path = tmp_path / "turned.jpg"
    path.write_bytes(encode_jpeg(upright, 95, orientation))
    with Image.open(path) as stored:
        assert stored.getexif().get(0x0112, 1) == orientation
        assert stored.size == ((80, 48) if orientation == 1 else (48, 80))
    read = cv2.imread(str(path), cv2.IMREAD_COLOR_RGB)
    assert read.shape == upright.shape
    assert np.abs(read.astype(int) - upright).mean() < 3


def test_the_sample_scenes_can_be_written_again(ground_truth):
    """The committed ground truth is what the script writes (a pixel of freedom for another OpenCV's interpolation)."""
    scenes = [(f"scene_{index:03d}.jpg", compose_sample("test", 7, index)) for index in range(len(ground_truth["images"]))]
    again = coco_ground_truth(scenes)
    assert again["images"] == ground_truth["images"] and again["categories"] == ground_truth["categories"]
    assert [a["category_id"] for a in again["annotations"]] == [a["category_id"] for a in ground_truth["annotations"]]
    boxes, committed = (np.array([a["bbox"] for a in gt["annotations"]]) for gt in (again, ground_truth))
    assert np.abs(boxes - committed).max() <= 1


def test_writing_scenes_gives_the_files_that_the_ground_truth_names(tmp_path):
    write_scenes(str(tmp_path), "validation", seed=1, count=6, jpeg_quality=50)
    written = json.loads((tmp_path / "ground_truth.json").read_text())
    assert [image["file_name"] for image in written["images"]] == [f"scene_{i:03d}.jpg" for i in range(6)]
    for image in written["images"]:
        assert cv2.imread(str(tmp_path / image["file_name"])).shape == (image["height"], image["width"], 3)
    assert {a["image_id"] for a in written["annotations"]} == {1, 2, 3, 5, 6}
    assert min(a["id"] for a in written["annotations"]) == 1


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

    images = np.stack([cv2.resize(compose_scene("test", 2, i).image, (320, 320)) for i in range(3)])
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


@pytest.mark.parametrize("module", ["training.train", "export", "training.write_scenes"])
def test_help_does_not_import_tensorflow(module):
    code = f"""
import runpy, sys
sys.argv = ["models.digits.{module}", "--help"]
try:
    runpy.run_module("models.digits.{module}", run_name="__main__")
except SystemExit as end:
    assert end.code == 0
assert "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_target_cells_of_a_digit_decode_to_its_box():
    """Pins the grid's convention: cell (row, column) stands for the point (column + 0.5, row + 0.5) * 8."""
    import tensorflow as tf

    from models.digits.network import boxes_px, cell_centres
    from models.digits.training.learning import assign_targets, detection_loss

    box = np.array([[100.0, 60.0, 140.0, 130.0]], np.float32)
    targets = assign_targets(box, np.array([7]))
    assert (targets.classes == 7).sum() == 4 and targets.classes[11, 14] == 7
    centres = cell_centres()
    np.testing.assert_array_equal(centres[11, 14], [116.0, 92.0])
    distances = np.concatenate([centres - targets.boxes[..., :2], targets.boxes[..., 2:] - centres], axis=-1) / 8
    log_distances = tf.constant(np.log(distances)[None])
    np.testing.assert_allclose(boxes_px(log_distances)[0, 11, 14], box[0], atol=1e-3)
    logits = tf.constant(np.where(np.eye(10)[targets.classes] * (targets.classes >= 0)[..., None], 20.0, -20.0)[None], tf.float32)
    score_loss, box_loss = detection_loss(logits, log_distances, targets.classes[None], targets.boxes[None])
    assert float(score_loss) < 1e-4 and float(box_loss) < 1e-4


def test_folding_keeps_what_the_batch_normalised_network_computes():
    """With the batch's own statistics as the moving averages, the folded network answers the same."""
    import tensorflow as tf

    from models.digits.network import FoldedNetwork, forward
    from models.digits.training import learning

    network = learning.TrainableNetwork(seed=1)
    images = tf.constant(np.random.default_rng(0).random((2, 320, 320, 3)).astype(np.float32))
    statistics: dict[str, tuple] = {}

    def convolve(name, x):
        layer_mean, layer_variance = network.means[name], network.variances[name]
        before = layer_mean.numpy(), layer_variance.numpy()
        y = network.convolve(name, x)
        if name not in ("class_logits", "box_distances"):
            statistics[name] = tuple(
                (after.numpy() - 0.98 * b) / 0.02 for after, b in zip((layer_mean, layer_variance), before, strict=True)
            )
        return y

    logits, _ = forward(images, convolve)
    for name, (mean, variance) in statistics.items():
        network.means[name].assign(mean)
        network.variances[name].assign(variance)
    folded = FoldedNetwork(network.folded())
    _, scores = folded.predict(images)
    np.testing.assert_allclose(scores, tf.reshape(tf.sigmoid(logits), [2, 1600, 10]), atol=2e-3)
