"""Networks built from a cfg compute what OpenCV computes, for every layer and option that it reads, in batches."""

import re

import numpy as np
import pytest

from models.darknet.network import Convolution, Route, Shortcut, parse_network
from models.darknet.weights import read_weights
from tests.fixtures import fixtures_dir
from tests.models.darknet_cases import HEAD, SMALL, STEM, by_opencv, random_values, write_weights

tf = pytest.importorskip("tensorflow")

from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2  # noqa: E402

from models.darknet.detector import ACTIVATION_FUNCTIONS, DarknetDetector, add, convolve, join  # noqa: E402


def assert_agrees(cfg, images, weights, values, read_as=None, rtol=1e-5, atol=2e-5, scores_atol=2e-5):
    """What a frozen graph, as it is served, finds in a batch is what OpenCV finds in each image."""
    write_weights(weights, values)
    network = parse_network(read_as or cfg, images.shape[1:3])
    detector = DarknetDetector(network, read_weights(str(weights), network))
    spec = tf.TensorSpec((None, *network.input_hw, 3), tf.float32)
    function = tf.function(detector, input_signature=[spec], autograph=False).get_concrete_function()
    found = convert_variables_to_constants_v2(function)(tf.constant(images.astype(np.float32) / 255))
    for image, boxes, scores in zip(images, *(values.numpy() for values in found), strict=True):
        expected_boxes, expected_scores = by_opencv(cfg, weights, image)
        np.testing.assert_allclose(boxes, expected_boxes, rtol=rtol, atol=atol)
        answered = expected_scores > 0
        assert answered.mean() > 0.05 and np.ptp(expected_scores) > 0.02
        np.testing.assert_allclose(scores[answered], expected_scores[answered], atol=scores_atol)


@pytest.mark.parametrize("name", SMALL)
def test_each_layer_and_option_agrees_with_opencv(name, tmp_path):
    cfg = SMALL[name]
    images = np.random.default_rng(5).integers(0, 256, (2, *parse_network(cfg).input_hw, 3), np.uint8)
    assert_agrees(cfg, images, tmp_path / "net.weights", random_values(cfg))


def test_the_input_size_can_differ_from_the_cfg(tmp_path):
    resized = (STEM + HEAD).replace("width=96", "width=160").replace("height=64", "height=32")
    images = np.random.default_rng(1).integers(0, 256, (1, 32, 160, 3), np.uint8)
    assert_agrees(resized, images, tmp_path / "net.weights", random_values(resized), read_as=STEM + HEAD)


def test_what_opencv_does_not_read_has_its_golden_values():
    """Strides of their own for rows and columns, relu6, groups of several sources, and sums of several."""
    assert ACTIVATION_FUNCTIONS["relu6"](tf.constant([-3.0, 5.0, 30.0])).numpy().tolist() == [0, 5, 6]
    x, kernel = (tf.constant(np.random.default_rng(1).normal(size=size), tf.float32) for size in ((1, 16, 16, 3), (3, 3, 3, 8)))
    each, some = (
        convolve(x, Convolution(1, (16 // h, 16 // w, 8), 3, 3, (h, w), 1, 1, False, "linear"), kernel, tf.zeros(8))
        for h, w in ((1, 1), (8, 4))
    )
    np.testing.assert_allclose(some, each[:, ::8, ::4], atol=1e-5)
    one, two = tf.constant([[[[1.0, 2, 3, 4]]]]), tf.constant([[[[5.0, 6, 7, 8]]]])
    assert join([one, two], Route(1, (1, 1, 4), (0, 1), 2, 1)).numpy().ravel().tolist() == [3, 4, 7, 8]
    assert add([one, two, two], Shortcut(1, (1, 1, 4), (0, 1), "linear")).numpy().ravel().tolist() == [11, 14, 17, 20]


def thinned(cfg):
    """The same network with an eighth of the channels, heads aside."""
    return re.sub(r"filters=(\d+)", lambda found: found[0] if found[1] == "255" else f"filters={int(found[1]) // 8}", cfg)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("name", ["yolov3", "yolov3-tiny", "yolov3-spp", "yolov4", "yolov4-tiny", "yolov4-csp"])
def test_published_networks_agree_with_opencv(name, tmp_path):
    cfg = thinned((fixtures_dir() / "darknet" / "cfg" / f"{name}.cfg").read_text())
    images = np.random.default_rng(2).integers(0, 256, (1, 160, 96, 3), np.uint8)
    assert_agrees(cfg, images, tmp_path / "net.weights", random_values(cfg, spread=0.7), rtol=1e-3, atol=1e-4, scores_atol=1e-3)
