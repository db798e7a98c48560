"""Networks built from a cfg compute what Darknet computes, for every layer and option, alone and in batches."""

import re

import numpy as np
import pytest

from models.darknet.network import parse_network
from models.darknet.weights import read_weights
from models.geometry import boxes_to_xyxy
from tests.fixtures import fixtures_dir
from tests.models import darknet_reference
from tests.models.darknet_cases import HEAD, SMALL, STEM, random_values, write_weights

tf = pytest.importorskip("tensorflow")

from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2  # noqa: E402

from models.darknet.detector import DarknetDetector, decode_boxes  # noqa: E402
from models.darknet.network import Yolo  # noqa: E402


def run(cfg, values, images, tmp_path, input_hw=None):
    """Boxes and confidences of a batch, through a frozen graph as it is served."""
    write_weights(tmp_path / "net.weights", values)
    network = parse_network(cfg, input_hw)
    detector = DarknetDetector(network, read_weights(str(tmp_path / "net.weights"), network))
    spec = tf.TensorSpec((None, *network.input_hw, 3), tf.float32)
    function = tf.function(detector, input_signature=[spec], autograph=False).get_concrete_function()
    boxes, scores = convert_variables_to_constants_v2(function)(tf.constant(images))
    return boxes.numpy(), scores.numpy()


@pytest.mark.parametrize("name", SMALL)
def test_each_layer_and_option_agrees_with_the_slow_reference(name, tmp_path):
    cfg = SMALL[name]
    values = random_values(cfg)
    images = np.random.default_rng(5).uniform(0, 1, (2, *parse_network(cfg).input_hw, 3)).astype(np.float32)
    boxes, scores = run(cfg, values, images, tmp_path)
    for image, image_boxes, image_scores in zip(images, boxes, scores, strict=True):
        expected_boxes, expected_scores, left_over = darknet_reference.detect(cfg, values, image.transpose(2, 0, 1))
        assert left_over.size == 0
        assert np.ptp(expected_scores) > 0.02
        np.testing.assert_allclose(image_boxes, boxes_to_xyxy(expected_boxes, "cxcywh"), atol=2e-5)
        np.testing.assert_allclose(image_scores, expected_scores, atol=2e-5)


@pytest.mark.parametrize(
    ("new_coords", "scale_x_y", "cell", "expected_box", "expected_score"),
    [
        (False, 1.0, [0, 0, 0, 0, 0, 0], [0.625, 0.5, 0.875, 1.0], 0.25),  # centre of the cell, anchor 16x16 in 64x32
        (False, 1.2, [np.log(3), 0, np.log(2), 0, 20, 20], [0.65, 0.5, 1.15, 1.0], 1.0),  # 0.75 * 1.2 - 0.1 = 0.8 into the cell
        (True, 2.0, [0.75, 0.5, 0.5, 1.0, 0.5, 0.5], [0.875, -0.25, 1.125, 1.75], 0.25),  # 0.75 * 2 - 0.5 = 1 into the cell
    ],
    ids=["plain", "scale_x_y", "new_coords"],
)
def test_boxes_are_decoded_to_their_golden_numbers(new_coords, scale_x_y, cell, expected_box, expected_score):
    layer = Yolo(1, (2, 2, 6), ((16.0, 16.0),), 1, scale_x_y, new_coords)
    head = np.full((1, 2, 2, 6), -9.0, np.float32)
    head[0, 1, 1] = cell
    boxes, scores = decode_boxes(tf.constant(head), layer, (32, 64))
    np.testing.assert_allclose(boxes[0, 3], expected_box, atol=1e-6)
    np.testing.assert_allclose(scores[0, 3], [expected_score], atol=1e-6)


def test_the_input_size_can_differ_from_the_cfg(tmp_path):
    cfg = STEM + HEAD
    image = np.random.default_rng(1).uniform(0, 1, (1, 32, 160, 3)).astype(np.float32)
    boxes, _ = run(cfg, random_values(cfg), image, tmp_path, input_hw=(32, 160))
    resized = cfg.replace("width=96", "width=160").replace("height=64", "height=32")
    expected, _, _ = darknet_reference.detect(resized, random_values(cfg), image[0].transpose(2, 0, 1))
    np.testing.assert_allclose(boxes[0], boxes_to_xyxy(expected, "cxcywh"), atol=2e-5)


def thinned(cfg):
    """The same network with an eighth of the channels, heads aside."""
    return re.sub(r"filters=(\d+)", lambda found: found[0] if found[1] == "255" else f"filters={int(found[1]) // 8}", cfg)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("name", ["yolov3", "yolov3-tiny", "yolov3-spp", "yolov4", "yolov4-tiny", "yolov4-csp"])
def test_published_networks_agree_with_opencv(name, tmp_path):
    cv2 = pytest.importorskip("cv2")
    if not hasattr(cv2.dnn, "readNetFromDarknet"):
        pytest.skip("this OpenCV reads no Darknet models (it has since 3.3 and until 5.0)")
    cfg, (h, w) = thinned((fixtures_dir() / "darknet" / "cfg" / f"{name}.cfg").read_text()), (160, 96)
    (tmp_path / "net.cfg").write_text(cfg)
    values = random_values(cfg, spread=0.7)
    image = np.random.default_rng(2).integers(0, 256, (h, w, 3), np.uint8)
    boxes, scores = run(cfg, values, image[None].astype(np.float32) / 255, tmp_path, input_hw=(h, w))
    opencv = cv2.dnn.readNetFromDarknet(str(tmp_path / "net.cfg"), str(tmp_path / "net.weights"))
    opencv.setInput(cv2.dnn.blobFromImage(image, 1 / 255, (w, h), swapRB=False))
    rows = np.concatenate(opencv.forward(opencv.getUnconnectedOutLayersNames()))
    np.testing.assert_allclose(boxes[0], boxes_to_xyxy(rows[:, :4], "cxcywh"), rtol=1e-3, atol=1e-4)
    answered = rows[:, 5:] > 0  # OpenCV writes 0 for the least confident
    assert answered.mean() > 0.05
    np.testing.assert_allclose(scores[0][answered], rows[:, 5:][answered], atol=1e-3)
