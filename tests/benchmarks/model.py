"""Makes the benchmarks' detector: YOLOv4-tiny at 416x416 with 80 classes, and random weights from a fixed seed.

It costs what the real one costs (6.06 million parameters, suppression in the graph); what it finds means nothing. The objectness
of the heads is set so that there are a few dozen candidates for an image, as on photos.

    serving_default     images float32 (N, 416, 416, 3) in 0..1 -> boxes (N, 100, 4) yxyx in 0..1, scores, classes, num
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from models.darknet.network import parse_network
from models.darknet.weights import read_weights
from tests.benchmarks.images import BENCH, SMALL, make_images
from tests.models.darknet_cases import conv, net, random_values, write_weights

SIDE, CLASSES, MOST = 416, 80, 100
_CALIBRATION_IMAGES = 8
_CANDIDATES = 45.0


def _stage(filters: int) -> str:
    """One cross-stage-partial block."""
    half = conv(filters // 2, 3)
    split = "[route]\nlayers=-1\ngroups=2\ngroup_id=1\n"
    merged = conv(filters) + "[route]\nlayers=-6,-1\n[maxpool]\nsize=2\nstride=2\n"
    return conv(filters, 3) + split + half + half + "[route]\nlayers=-1,-2\n" + merged


def _head(mask: str) -> str:
    anchors = "10,14, 23,27, 37,58, 81,82, 135,169, 344,319"
    layer = conv(3 * (5 + CLASSES), extra="pad=1", activation="linear")
    return layer + f"[yolo]\nmask={mask}\nanchors={anchors}\nclasses={CLASSES}\nnum=6\nscale_x_y=1.05\n"


_COARSE = conv(512, 3) + conv(256) + conv(512, 3) + _head("3,4,5")
_FINE = "[route]\nlayers=-4\n" + conv(128) + "[upsample]\nstride=2\n[route]\nlayers=-1,23\n" + conv(256, 3) + _head("1,2,3")
_CFG = net(SIDE, SIDE) + conv(32, 3, 2) + conv(64, 3, 2) + _stage(64) + _stage(128) + _stage(256) + _COARSE + _FINE


def make_model() -> Path:
    """The SavedModel's folder; made if it is not there."""
    folder, unfinished = BENCH / "model", BENCH / "model.unfinished"
    if folder.exists():
        return folder
    import tensorflow as tf

    from models.darknet.detector import DarknetDetector

    images = tf.constant(_calibration_images())
    write_weights(BENCH / "model.weights", random_values(_CFG))
    network = parse_network(_CFG)
    detector, module = DarknetDetector(network, read_weights(str(BENCH / "model.weights"), network)), tf.Module()
    _calibrate(detector, images)
    module.weights = detector.variables

    @tf.function(input_signature=[tf.TensorSpec((None, SIDE, SIDE, 3), tf.float32, "images")], autograph=False)
    def serving_default(images: Any) -> dict[str, Any]:
        boxes, scores = detector(images)
        boxes = tf.gather(boxes, [1, 0, 3, 2], axis=-1)[:, :, None]
        kept = tf.image.combined_non_max_suppression(boxes, scores, MOST, MOST, iou_threshold=0.45, score_threshold=0.25)
        return dict(zip(("boxes", "scores", "classes", "num"), kept, strict=True))

    shutil.rmtree(unfinished, ignore_errors=True)
    tf.saved_model.save(module, str(unfinished), signatures={"serving_default": serving_default})
    unfinished.rename(folder)
    return folder


def _calibrate(detector: Any, images: Any) -> None:
    """Shifts the objectness by bisection on the number of candidates."""
    objectness = np.tile(np.eye(5 + CLASSES, dtype=np.float32)[4], 3)
    biases = [each for each in detector.variables if each.shape == objectness.shape]
    before, low, high = [each.numpy() for each in biases], -20.0, 5.0
    for _ in range(14):
        shift = (low + high) / 2
        for bias, value in zip(biases, before, strict=True):
            bias.assign(value + objectness * shift)
        candidates = np.minimum((detector(images)[1].numpy() > 0.25).sum((1, 2)), 200).mean()
        low, high = (shift, high) if candidates < _CANDIDATES else (low, shift)


def _calibration_images() -> np.ndarray:
    files = sorted(make_images(SMALL).glob("*.jpg"))
    chosen = files[:: len(files) // _CALIBRATION_IMAGES][:_CALIBRATION_IMAGES]
    pixels = [cv2.resize(cv2.imread(str(file), cv2.IMREAD_COLOR_RGB), (SIDE, SIDE)) for file in chosen]
    return np.stack(pixels).astype(np.float32) / 255


if __name__ == "__main__":
    print(make_model())
