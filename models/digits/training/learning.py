"""Parts of the training: batch-normalised convolutions, targets and losses."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from models.digits.network import CLASS_COUNT, GRID_HW, LAYERS, STRIDE, Weights, boxes_px, cell_centres

_BATCH_NORM_EPSILON = 1e-3
_BATCH_NORM_MOMENTUM = 0.98
# A cell belongs to a digit's box if its centre is at most this far from the box's centre, in strides.
_CENTRE_RADIUS = 1.25
# The first scores are 1 %, so that the 99.7 % of cells without a digit do not dominate the loss (Lin et al., 2017).
_INITIAL_LOGIT = -math.log(99.0)


class Targets(NamedTuple):
    """The wanted output of the grid for a batch of images.

    Attributes:
        classes: (N, 40, 40) int32, the digit of a cell, -1 without one.
        boxes: (N, 40, 40, 4) float32 `xyxy` in pixels of the input; a unit box for a cell without digit.
    """

    classes: NDArray[np.int32]
    boxes: NDArray[np.float32]


def assign_targets(boxes_xyxy: NDArray[np.float32], labels: NDArray[np.int64]) -> Targets:
    """Assigns to each box the cells near its centre, at least the nearest one; no batch axis.

    Args:
        boxes_xyxy: (M, 4) float32, pixels of the input.
        labels: (M,) int64.

    Returns:
        Targets of one image: `classes` (40, 40) and `boxes` (40, 40, 4).
    """
    centres = cell_centres()
    classes = np.full(GRID_HW, -1, np.int32)
    boxes = np.concatenate([centres - 0.5, centres + 0.5], axis=-1)
    for box, label in zip(boxes_xyxy, labels, strict=True):
        middle = (box[:2] + box[2:]) / 2
        offset = np.abs(centres - middle)
        inside = (centres > box[:2]).all(-1) & (centres < box[2:]).all(-1)
        near = (offset.max(-1) <= _CENTRE_RADIUS * STRIDE) & inside
        near[min(int(middle[1] // STRIDE), GRID_HW[0] - 1), min(int(middle[0] // STRIDE), GRID_HW[1] - 1)] = True
        classes[near], boxes[near] = label, box
    return Targets(classes, boxes)


class TrainableNetwork(tf.Module):
    """The layers of the network with batch normalisation and its moving averages."""

    def __init__(self, seed: int) -> None:
        super().__init__(name="digits_training")
        self.kernels: dict[str, tf.Variable] = {}
        self.scales: dict[str, tf.Variable] = {}
        self.biases: dict[str, tf.Variable] = {}
        self.means: dict[str, tf.Variable] = {}
        self.variances: dict[str, tf.Variable] = {}
        rng = np.random.default_rng(seed)
        for name, layer in LAYERS.items():
            shape = layer.kernel, layer.kernel, layer.inputs, layer.outputs
            deviation = math.sqrt(2.0 / (layer.kernel**2 * layer.inputs)) if layer.normalised else 0.01
            self.kernels[name] = tf.Variable(rng.normal(0.0, deviation, shape).astype(np.float32))
            # A residual branch starts near zero, so that its block starts as the identity (Goyal et al., 2017).
            scale = tf.fill([layer.outputs], 0.2 if name.endswith("_b") else 1.0)
            self.scales[name] = tf.Variable(scale, trainable=layer.normalised)
            start = {"class_logits": _INITIAL_LOGIT, "box_distances": 0.7}.get(name, 0.0)
            self.biases[name] = tf.Variable(tf.fill([layer.outputs], start))
            self.means[name] = tf.Variable(tf.zeros([layer.outputs]), trainable=False)
            self.variances[name] = tf.Variable(tf.ones([layer.outputs]), trainable=False)

    def convolve(self, name: str, x: tf.Tensor) -> tf.Tensor:
        """Applies a layer with the statistics of the batch, and updates the moving averages."""
        layer = LAYERS[name]
        x = tf.nn.conv2d(x, self.kernels[name], layer.stride, "SAME")
        if not layer.normalised:
            return tf.nn.bias_add(x, self.biases[name])
        x, mean, variance = tf.compat.v1.nn.fused_batch_norm(
            x, self.scales[name], self.biases[name], epsilon=_BATCH_NORM_EPSILON, is_training=True
        )
        self.means[name].assign(_BATCH_NORM_MOMENTUM * self.means[name] + (1 - _BATCH_NORM_MOMENTUM) * mean)
        self.variances[name].assign(_BATCH_NORM_MOMENTUM * self.variances[name] + (1 - _BATCH_NORM_MOMENTUM) * variance)
        return tf.nn.relu(x) if layer.relu else x

    def folded(self) -> Weights:
        """Folds each batch normalisation into its convolution.

        Returns:
            `<layer>/kernel` and `<layer>/bias` for every layer.
        """
        weights: Weights = {}
        for name, layer in LAYERS.items():
            kernel, bias = self.kernels[name].numpy(), self.biases[name].numpy()
            if layer.normalised:
                factor = self.scales[name].numpy() / np.sqrt(self.variances[name].numpy() + _BATCH_NORM_EPSILON)
                kernel, bias = kernel * factor, bias - self.means[name].numpy() * factor
            weights[f"{name}/kernel"], weights[f"{name}/bias"] = kernel, bias
        return weights


def detection_loss(
    logits: tf.Tensor, log_distances: tf.Tensor, classes: tf.Tensor, boxes: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Quality focal loss of the scores and distance-IoU loss of the boxes, both divided by the number of cells with a digit.

    Args:
        logits: (N, 40, 40, 10) float32.
        log_distances: (N, 40, 40, 4) float32.
        classes: (N, 40, 40) int32, see `Targets`.
        boxes: (N, 40, 40, 4) float32, see `Targets`.

    Returns:
        The score loss and the box loss, scalars.
    """
    has_digit = tf.cast(classes >= 0, tf.float32)
    count = tf.maximum(tf.reduce_sum(has_digit), 1.0)
    predicted = boxes_px(log_distances)
    iou, distance = _iou_and_distance(predicted, boxes)
    box_loss = tf.reduce_sum((1.0 - iou + distance) * has_digit) / count
    quality = tf.one_hot(classes, CLASS_COUNT) * tf.stop_gradient(iou)[..., None]
    cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits(quality, logits)
    score_loss = tf.reduce_sum(cross_entropy * tf.square(quality - tf.sigmoid(logits))) / count
    return score_loss, box_loss


def _iou_and_distance(a: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """IoU of paired boxes, and the distance of their centres relative to the enclosing box (Zheng et al., DIoU, 2020)."""
    low, high = tf.maximum(a[..., :2], b[..., :2]), tf.minimum(a[..., 2:], b[..., 2:])
    intersection = tf.reduce_prod(tf.maximum(high - low, 0.0), axis=-1)
    areas = tf.reduce_prod(a[..., 2:] - a[..., :2], axis=-1) + tf.reduce_prod(b[..., 2:] - b[..., :2], axis=-1)
    span = tf.maximum(a[..., 2:], b[..., 2:]) - tf.minimum(a[..., :2], b[..., :2])
    apart = (a[..., :2] + a[..., 2:] - b[..., :2] - b[..., 2:]) / 2
    distance = tf.reduce_sum(tf.square(apart), axis=-1) / (tf.reduce_sum(tf.square(span), axis=-1) + 1e-6)
    return intersection / (areas - intersection + 1e-6), distance
