"""Makes the benchmarks' detector: the layers of YOLOv4-tiny at 416x416 with 80 classes, and random weights from a fixed seed.

It costs what the real one costs (6.06 million parameters, batch normalisation, suppression in the graph); what it finds
means nothing. Each layer's normalisation is set from a few of the images, so that values neither vanish nor explode, and the
objectness of the heads so that there are a few dozen candidates for an image, as on photos.

    serving_default     images float32 (N, 416, 416, 3) in 0..1 -> boxes (N, 100, 4) yxyx in 0..1, scores, classes, num
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from tests.benchmarks.images import BENCH, SMALL, make_images

SIDE, CLASSES, MOST = 416, 80, 100
_ANCHORS = {13: [(81, 82), (135, 169), (344, 319)], 26: [(23, 27), (37, 58), (81, 82)]}  # w, h in pixels: yolov4-tiny.cfg
_HEAD = 3 * (5 + CLASSES)
_CALIBRATION_IMAGES = 24
_CANDIDATES = 45.0
# standard deviations that the heads' values get: x, y, w, h, objectness, then the classes
_SPREAD = np.array([1.5, 1.5, 0.4, 0.4, 1.5] + [2.0] * CLASSES, np.float32)


def make_model() -> Path:
    """The SavedModel's folder; made if it is not there."""
    folder = BENCH / "model"
    if folder.exists():
        return folder
    import tensorflow as tf

    network, module = Network(), tf.Module()
    network.calibrate(_calibration_images())
    module.weights = list(network.variables.values())

    @tf.function(input_signature=[tf.TensorSpec((None, SIDE, SIDE, 3), tf.float32, "images")], autograph=False)
    def serving_default(images: Any) -> dict[str, Any]:
        boxes, scores = _decode(network(images))
        kept = tf.image.combined_non_max_suppression(
            boxes[:, :, None], scores, MOST, MOST, iou_threshold=0.45, score_threshold=0.25
        )
        return dict(zip(("boxes", "scores", "classes", "num"), kept, strict=True))

    unfinished = BENCH / "model.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    tf.saved_model.save(module, str(unfinished), signatures={"serving_default": serving_default})
    unfinished.rename(folder)
    return folder


class Network:
    """YOLOv4-tiny over variables that are made at the first call. While `calibrating`, a call sets the normalisations."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(7)
        self.variables: dict[str, Any] = {}
        self.calibrating = False

    def __call__(self, images: Any) -> list[Any]:
        """Images float32 (N, 416, 416, 3) in 0..1 -> the heads (N, 13, 13, 255) and (N, 26, 26, 255)."""
        import tensorflow as tf

        self._layer = 0
        x = self._conv(self._conv(images, 32, 3, stride=2), 64, 3, stride=2)
        x, _ = self._partial_stage(x, 64)
        x, _ = self._partial_stage(x, 128)
        x, fine = self._partial_stage(x, 256)
        x = self._conv(self._conv(x, 512, 3), 256, 1)
        coarse_head = self._head(self._conv(x, 512, 3))
        up = tf.image.resize(self._conv(x, 128, 1), fine.shape[1:3], "nearest")
        fine_head = self._head(self._conv(tf.concat([up, fine], -1), 256, 3))
        return [coarse_head, fine_head]

    def calibrate(self, images: np.ndarray) -> None:
        """Sets the normalisations, then the objectness by bisection on the number of candidates."""
        import tensorflow as tf

        self.calibrating = True
        heads = self(tf.constant(images))
        self.calibrating = False
        low, high = -20.0, 5.0
        for _ in range(14):
            shift = (low + high) / 2
            objectness = tf.one_hot([4], 5 + CLASSES)[0] * shift
            scores = _decode([head + tf.tile(objectness, [3]) for head in heads])[1].numpy()
            candidates = np.minimum((scores > 0.25).sum((1, 2)), 200).mean()
            low, high = (shift, high) if candidates < _CANDIDATES else (low, shift)
        for name, variable in self.variables.items():
            if name.endswith("head_bias"):
                variable.assign_add(tf.tile(objectness, [3]))

    def _conv(self, x: Any, filters: int, size: int, stride: int = 1) -> Any:
        import tensorflow as tf

        name = self._next_name()
        padding = [[0, 0], [1, 0], [1, 0], [0, 0]] if stride == 2 else "SAME"
        x = tf.nn.conv2d(x, self._kernel(name, x, filters, size), stride, padding)
        mean, variance = self._variable(name + "mean", np.zeros(filters)), self._variable(name + "variance", np.ones(filters))
        if self.calibrating:
            for statistic, value in zip((mean, variance), tf.nn.moments(x, [0, 1, 2]), strict=True):
                statistic.assign(value)
        scale, offset = self._variable(name + "scale", np.ones(filters)), self._variable(name + "offset", np.zeros(filters))
        return tf.nn.leaky_relu(tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3), 0.1)

    def _partial_stage(self, x: Any, filters: int) -> tuple[Any, Any]:
        """One cross-stage-partial block: (pooled, what goes to the fine head)."""
        import tensorflow as tf

        route = self._conv(x, filters, 3)
        first = self._conv(route[..., filters // 2 :], filters // 2, 3)
        second = self._conv(first, filters // 2, 3)
        merged = self._conv(tf.concat([second, first], -1), filters, 1)
        return tf.nn.max_pool2d(tf.concat([route, merged], -1), 2, 2, "VALID"), merged

    def _head(self, x: Any) -> Any:
        import tensorflow as tf

        name = self._next_name()
        kernel, bias = self._kernel(name, x, _HEAD, 1), self._variable(name + "head_bias", np.zeros(_HEAD))
        if self.calibrating:
            mean, variance = tf.nn.moments(tf.nn.conv2d(x, kernel, 1, "SAME"), [0, 1, 2])
            gain = np.tile(_SPREAD, 3) / tf.sqrt(variance)
            kernel.assign(kernel * gain)
            bias.assign(-mean * gain - np.tile([0.0] * 5 + [2.0] * CLASSES, 3).astype(np.float32))
        return tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), bias)

    def _next_name(self) -> str:
        self._layer += 1
        return f"layer{self._layer:02d}_"

    def _kernel(self, name: str, x: Any, filters: int, size: int) -> Any:
        shape = (size, size, int(x.shape[-1]), filters)
        return self._variable(name + "kernel", self._rng.normal(0, np.sqrt(2 / np.prod(shape[:3])), shape))

    def _variable(self, name: str, value: np.ndarray) -> Any:
        import tensorflow as tf

        if name not in self.variables:
            self.variables[name] = tf.Variable(value.astype(np.float32), name=name)
        return self.variables[name]


def _decode(heads: list[Any]) -> tuple[Any, Any]:
    """Heads -> boxes (N, M, 4) yxyx in 0..1 and class scores (N, M, 80)."""
    import tensorflow as tf

    boxes, scores = [], []
    for head in heads:
        grid = head.shape[1]
        values = tf.reshape(head, (-1, grid, grid, 3, 5 + CLASSES))
        corner = np.stack(np.meshgrid(np.arange(grid), np.arange(grid)), -1).astype(np.float32)[None, :, :, None]
        centre = (tf.sigmoid(values[..., :2]) + corner) / grid
        half = tf.exp(values[..., 2:4]) * (np.array(_ANCHORS[grid], np.float32) / SIDE / 2)
        box = tf.concat([(centre - half)[..., ::-1], (centre + half)[..., ::-1]], -1)
        boxes.append(tf.reshape(box, (-1, grid * grid * 3, 4)))
        confidence = tf.sigmoid(values[..., 4:5]) * tf.sigmoid(values[..., 5:])
        scores.append(tf.reshape(confidence, (-1, grid * grid * 3, CLASSES)))
    return tf.concat(boxes, 1), tf.concat(scores, 1)


def _calibration_images() -> np.ndarray:
    files = sorted(make_images(SMALL).glob("*.jpg"))
    chosen = files[:: len(files) // _CALIBRATION_IMAGES][:_CALIBRATION_IMAGES]
    pixels = [cv2.resize(cv2.imread(str(file), cv2.IMREAD_COLOR_RGB), (SIDE, SIDE)) for file in chosen]
    return np.stack(pixels).astype(np.float32) / 255


if __name__ == "__main__":
    print(make_model())
