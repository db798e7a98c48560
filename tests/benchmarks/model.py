"""Makes the benchmarks' detector: YOLOv4-tiny at 416x416 with 80 classes, and random weights from a fixed seed.

It costs what the real one costs (6.06 million parameters, suppression in the graph); what it finds means nothing. There are a few
dozen candidates for an image, as on photos.

    serving_default     images float32 (N, 416, 416, 3) in 0..1 -> boxes (N, 100, 4) yxyx in 0..1, scores, classes, num
    from_bytes          image_bytes string (N,), decoded and stretched in the graph -> the same, and wh (N, 2), the images' sizes
    before_suppression  images as above -> boxes (N, 2535, 4) as above, scores (N, 2535, 80); `make_onnx` converts it, since the
                        operator that tf2onnx makes of TensorFlow's suppression takes half a second an image
"""

from __future__ import annotations

import shutil
import subprocess
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
    """The SavedModel's folder; made if it is not there, or without its last signature."""
    folder, unfinished, graph = BENCH / "model", BENCH / "model.unfinished", BENCH / "model" / "saved_model.pb"
    if graph.exists() and b"before_suppression" in graph.read_bytes():
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

    images = tf.TensorSpec((None, SIDE, SIDE, 3), tf.float32, "images")

    @tf.function(input_signature=[images], autograph=False)
    def before_suppression(images: Any) -> dict[str, Any]:
        boxes, scores = detector(images)
        return {"boxes": tf.gather(boxes, [1, 0, 3, 2], axis=-1), "scores": scores}

    @tf.function(input_signature=[images], autograph=False)
    def serving_default(images: Any) -> dict[str, Any]:
        found = before_suppression(images)
        boxes, scores = found["boxes"][:, :, None], found["scores"]
        kept = tf.image.combined_non_max_suppression(boxes, scores, MOST, MOST, iou_threshold=0.45, score_threshold=0.25)
        return dict(zip(("boxes", "scores", "classes", "num"), kept, strict=True))

    def decode(encoded: Any) -> Any:
        image = tf.ensure_shape(tf.io.decode_image(encoded, channels=3, expand_animations=False), (None, None, 3))
        return tf.image.resize(image, (SIDE, SIDE)) / 255.0, tf.shape(image)[1::-1]

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.string, "image_bytes")], autograph=False)
    def from_bytes(image_bytes: Any) -> dict[str, Any]:
        decoded = (tf.TensorSpec((SIDE, SIDE, 3), tf.float32), tf.TensorSpec((2,), tf.int32))
        pixels, wh = tf.map_fn(decode, image_bytes, fn_output_signature=decoded)
        return serving_default(pixels) | {"wh": wh}

    for old in (unfinished, folder):
        shutil.rmtree(old, ignore_errors=True)
    signatures = {"serving_default": serving_default, "from_bytes": from_bytes, "before_suppression": before_suppression}
    tf.saved_model.save(module, str(unfinished), signatures=signatures)
    unfinished.rename(folder)
    return folder


def make_onnx(python: str) -> Path:
    """The network before its suppression as an ONNX file, made by tf2onnx, which that Python has; made if it is not there."""
    file, unfinished = BENCH / "model.onnx", BENCH / "unfinished.onnx"
    if not file.exists():
        which = ["--saved-model", str(make_model()), "--signature_def", "before_suppression", "--tag", "serve"]
        command = [python, "-m", "tf2onnx.convert", *which, "--opset", "17", "--output", str(unfinished)]
        subprocess.run(command, check=True, capture_output=True)
        unfinished.rename(file)
    return file


if __name__ == "__main__":
    print(make_model())
