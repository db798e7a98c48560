"""The detector's network: a residual backbone down to stride 16, joined at stride 8, and one anchor-free head.

Every cell of the 40x40 grid (stride 8) predicts the distances to the four edges of the digit around it, as in FCOS (Tian et al.,
2019). It also predicts one score per class. Training moved this score towards the IoU of the predicted box (Li et al.,
Generalized Focal Loss, 2020), so there is no separate objectness.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

INPUT_HW = (320, 320)
STRIDE = 8
GRID_HW = (INPUT_HW[0] // STRIDE, INPUT_HW[1] // STRIDE)
CLASS_COUNT = 10

Weights = dict[str, NDArray[np.float32]]
Convolve = Callable[[str, "tf.Tensor"], "tf.Tensor"]


@dataclass(frozen=True, slots=True)
class ConvLayer:
    """A convolution with 'same' padding, and ReLU unless it is an output or ends a residual branch."""

    kernel: int
    stride: int
    inputs: int
    outputs: int
    relu: bool = True


def _residual(name: str, width: int) -> dict[str, ConvLayer]:
    return {f"{name}_a": ConvLayer(3, 1, width, width), f"{name}_b": ConvLayer(3, 1, width, width, relu=False)}


LAYERS: dict[str, ConvLayer] = {
    "stem": ConvLayer(3, 2, 3, 16),
    "down4": ConvLayer(3, 2, 16, 24),
    "down8": ConvLayer(3, 2, 24, 48),
    **_residual("block8", 48),
    "down16": ConvLayer(3, 2, 48, 96),
    **_residual("block16", 96),
    **_residual("block16x", 96),
    "up8": ConvLayer(1, 1, 96, 48, relu=False),
    "join": ConvLayer(3, 1, 48, 64),
    "class_tower": ConvLayer(3, 1, 64, 64),
    "box_tower": ConvLayer(3, 1, 64, 48),
    "class_logits": ConvLayer(1, 1, 64, CLASS_COUNT, relu=False),
    "box_distances": ConvLayer(1, 1, 48, 4, relu=False),
}


def forward(images: tf.Tensor, convolve: Convolve) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes the two outputs of the network.

    Args:
        images: (N, 320, 320, 3) float32 RGB in 0..1.
        convolve: applies a layer of `LAYERS` by its name, with its ReLU if it has one.

    Returns:
        Class logits (N, 40, 40, 10) and the logarithms of the distances to the edges, left, top, right, bottom, in strides
        (N, 40, 40, 4); float32.
    """

    def residual(name: str, x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(x + convolve(f"{name}_b", convolve(f"{name}_a", x)))

    x = convolve("down4", convolve("stem", images * 2.0 - 1.0))
    fine = residual("block8", convolve("down8", x))
    coarse = residual("block16x", residual("block16", convolve("down16", fine)))
    raised = tf.repeat(tf.repeat(convolve("up8", coarse), 2, axis=1), 2, axis=2)
    joined = convolve("join", tf.nn.relu(fine + raised))
    return convolve("class_logits", convolve("class_tower", joined)), convolve("box_distances", convolve("box_tower", joined))


def cell_centres() -> NDArray[np.float32]:
    """(40, 40, 2) float32: x and y of each cell's centre in pixels of the input, (column + 0.5) * stride."""
    ys, xs = np.mgrid[: GRID_HW[0], : GRID_HW[1]].astype(np.float32)
    return np.asarray((np.stack([xs, ys], axis=-1) + 0.5) * STRIDE, np.float32)


def boxes_px(log_distances: tf.Tensor) -> tf.Tensor:
    """Decodes (N, 40, 40, 4) logarithms of edge distances to (N, 40, 40, 4) float32 `xyxy` in pixels of the input."""
    distances = tf.exp(tf.clip_by_value(tf.cast(log_distances, tf.float32), -6.0, 4.0)) * STRIDE
    centres = tf.constant(cell_centres())
    return tf.concat([centres - distances[..., :2], centres + distances[..., 2:]], axis=-1)


class FoldedNetwork(tf.Module):
    """The exported network, with every batch normalisation folded into its convolution.

    Args:
        weights: for each layer of `LAYERS` `<name>/kernel` (k, k, in, out) and `<name>/bias` (out,), float32.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__(name="digits")
        self._parameters = {key: tf.Variable(array, trainable=False, name=key) for key, array in weights.items()}

    def predict(self, images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Predicts candidate boxes and scores.

        Args:
            images: (N, 320, 320, 3) float32 RGB in 0..1.

        Returns:
            (N, 1600, 4) float32 `xyxy` as shares of the input, clipped to it; and (N, 1600, 10) float32 scores in 0..1.
        """
        logits, log_distances = forward(images, self._convolve)
        size = tf.constant([INPUT_HW[1], INPUT_HW[0]] * 2, tf.float32)
        boxes = tf.clip_by_value(boxes_px(log_distances) / size, 0.0, 1.0)
        cells = GRID_HW[0] * GRID_HW[1]
        return tf.reshape(boxes, [-1, cells, 4]), tf.reshape(tf.sigmoid(logits), [-1, cells, CLASS_COUNT])

    def _convolve(self, name: str, x: tf.Tensor) -> tf.Tensor:
        layer = LAYERS[name]
        kernel, bias = self._parameters[f"{name}/kernel"], self._parameters[f"{name}/bias"]
        x = tf.nn.bias_add(tf.nn.conv2d(x, kernel, layer.stride, "SAME"), bias)
        return tf.nn.relu(x) if layer.relu else x


def load_weights(path: str) -> Weights:
    """Reads the folded weights of an `.npz` file (float16, to keep the repository small) as float32.

    Raises:
        ValueError: arrays are missing, unknown or of another shape than in `LAYERS`.
    """
    with np.load(path) as archive:
        weights = {key: archive[key].astype(np.float32) for key in archive.files}
    expected: dict[str, tuple[int, ...]] = {}
    for name, layer in LAYERS.items():
        expected[f"{name}/kernel"] = (layer.kernel, layer.kernel, layer.inputs, layer.outputs)
        expected[f"{name}/bias"] = (layer.outputs,)
    found = {key: array.shape for key, array in weights.items()}
    wrong = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
    if wrong:
        raise ValueError(
            f"{path}: expected the layers of models/digits/network.py, but these arrays differ: {', '.join(wrong)}; "
            "take the committed weights.npz"
        )
    return weights
