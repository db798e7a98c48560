"""Makes the benchmarks' detector: YOLOv4-tiny at 416x416 with 80 classes, and random weights from a fixed seed.

It costs what the real one costs (6.06 million parameters, suppression in the graph); what it finds means nothing. There are a few
dozen candidates for an image, as on photos.

    serving_default     images float32 (N, 416, 416, 3) in 0..1 -> boxes (N, 100, 4) yxyx in 0..1, scores, classes, num
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from models.darknet.network import parse_network
from models.darknet.weights import read_weights
from tests.benchmarks.images import BENCH
from tests.models.darknet_cases import conv, net, random_values, write_weights

SIDE, CLASSES, MOST = 416, 80, 100
_OBJECTNESS = -1.39495849609375  # of the heads: with it eight of the benchmarks' images have 44 candidates on average


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
    BENCH.mkdir(exist_ok=True)
    import tensorflow as tf

    from models.darknet.detector import DarknetDetector

    write_weights(BENCH / "model.weights", random_values(_CFG))
    network = parse_network(_CFG)
    detector, module = DarknetDetector(network, read_weights(str(BENCH / "model.weights"), network)), tf.Module()
    objectness = np.tile(np.eye(5 + CLASSES, dtype=np.float32)[4], 3)
    for bias in detector.variables:
        if bias.shape == objectness.shape:
            bias.assign_add(_OBJECTNESS * objectness)
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


if __name__ == "__main__":
    print(make_model())
