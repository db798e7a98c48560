"""A Darknet network in TensorFlow: a batch of images to boxes and class confidences.

`DarknetDetector` applies the layers of the cfg; each kind of layer has a function below. The formulas are those of Darknet's
`forward_*_layer` and `get_yolo_box` (github.com/AlexeyAB/darknet), channels last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from models.darknet.network import Convolution, MaxPool, Network, Route, Shortcut, Upsample, Yolo
from models.darknet.weights import ConvolutionWeights


class DarknetDetector:
    """A network with its weights; `export.export_detector` exports it."""

    def __init__(self, network: Network, weights: Sequence[ConvolutionWeights]) -> None:
        self.network = network
        self._weights = [(tf.Variable(w.kernel, trainable=False), tf.Variable(w.bias, trainable=False)) for w in weights]
        self.variables = [variable for pair in self._weights for variable in pair]

    def __call__(self, images: tf.Tensor, dtype: tf.DType = tf.float32) -> tuple[tf.Tensor, tf.Tensor]:
        """Detects in a batch.

        Args:
          images: `(N, H, W, 3) float32` RGB in 0..1.
          dtype: Of the layers. Boxes are decoded in float32: float16 has steps of half a pixel at 640.

        Returns:
          Boxes `(N, M, 4)`, xyxy in 0..1 of the input, and the classes' confidences `(N, M, C)`, for all heads and anchors.
        """
        weights = iter([(tf.cast(kernel, dtype), tf.cast(bias, dtype)) for kernel, bias in self._weights])
        outputs: list[tf.Tensor] = []
        boxes, scores = [], []
        x = tf.cast(images, dtype)
        for layer in self.network.layers:
            match layer:
                case Convolution():
                    x = convolve(x, layer, *next(weights))
                case MaxPool():
                    x = max_pool(x, layer)
                case Upsample():
                    x = tf.raw_ops.ResizeNearestNeighbor(images=x, size=layer.out_hwc[:2])
                case Route():
                    x = join([outputs[source] for source in layer.layers], layer)
                case Shortcut():
                    x = add([x, *(outputs[source] for source in layer.layers)], layer)
                case Yolo():
                    head_boxes, head_scores = decode_boxes(tf.cast(x, tf.float32), layer, self.network.input_hw)
                    boxes.append(head_boxes)
                    scores.append(head_scores)
            outputs.append(x)
        return tf.concat(boxes, axis=1), tf.concat(scores, axis=1)


def convolve(x: tf.Tensor, layer: Convolution, kernel: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """Convolves (also in groups and depthwise), adds the bias, activates."""
    margins = _margins(x, layer, layer.padding)
    if layer.groups == layer.in_channels > 1:
        if margins != "SAME":  # TensorFlow 2.21 aborts on explicit padding here, while it optimises the graph
            x, margins = tf.pad(x, margins), "VALID"
        per_channel = tf.reshape(kernel, (layer.size, layer.size, layer.groups, layer.filters // layer.groups))
        x = tf.nn.depthwise_conv2d(x, per_channel, (1, *layer.stride_hw, 1), margins)
    else:
        x = tf.nn.conv2d(x, kernel, layer.stride_hw, margins)
    return ACTIVATION_FUNCTIONS[layer.activation](tf.nn.bias_add(x, bias))


# of `network.ACTIVATIONS`, in a form that TensorFlow's graph optimiser fuses
ACTIVATION_FUNCTIONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "linear": lambda x: x,
    "leaky": lambda x: tf.nn.leaky_relu(x, alpha=0.1),
    "relu": tf.nn.relu,
    "relu6": tf.nn.relu6,
    "logistic": tf.sigmoid,
    "swish": lambda x: x * tf.sigmoid(x),
    "mish": lambda x: x * tf.tanh(tf.nn.softplus(x)),
}


def max_pool(x: tf.Tensor, layer: MaxPool) -> tf.Tensor:
    """Max-pools; padding never wins."""
    return tf.nn.max_pool2d(x, layer.size, layer.stride_hw, _margins(x, layer, layer.padding // 2))


def _margins(x: tf.Tensor, layer: Convolution | MaxPool, before: int) -> str | list[list[int]]:
    """Padding for TensorFlow if windows start `before` pixels outside: `SAME` if it is equal, else explicit."""
    explicit, same = [[0, 0]], True
    for in_side, out_side, stride in zip(x.shape[1:3], layer.out_hwc[:2], layer.stride_hw, strict=True):
        needed = max(0, (out_side - 1) * stride + layer.size - in_side)
        same &= before == needed // 2 and out_side == -(-in_side // stride)
        explicit.append([before, max(0, needed - before)])
    return "SAME" if same else [*explicit, [0, 0]]


def join(sources: Sequence[tf.Tensor], layer: Route) -> tf.Tensor:
    """Concatenates the chosen group of channels of each source."""
    if layer.groups > 1:
        sources = [tf.split(source, layer.groups, axis=-1)[layer.group_id] for source in sources]
    return tf.concat(sources, axis=-1) if len(sources) > 1 else sources[0]


def add(sources: Sequence[tf.Tensor], layer: Shortcut) -> tf.Tensor:
    """Adds the other sources to the first, cut or zero-padded to its number of channels, and activates."""
    x, *others = sources
    for other in others:
        missing = max(0, x.shape[-1] - other.shape[-1])
        x += tf.pad(other[..., : x.shape[-1]], [[0, 0], [0, 0], [0, 0], [0, missing]]) if x.shape != other.shape else other
    return ACTIVATION_FUNCTIONS[layer.activation](x)


def decode_boxes(x: tf.Tensor, layer: Yolo, input_hw: tuple[int, int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Decodes a head `(N, rows, columns, anchors * (5 + C))` to boxes `(N, M, 4)` and confidences `(N, M, C)`."""
    (rows, columns, _), anchors = layer.out_hwc, len(layer.anchors_wh)
    grid = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).astype(np.float32)  # x, y of each cell
    cell_xy = np.repeat(grid.reshape(-1, 2), anchors, axis=0)
    anchor_wh = np.tile(np.array(layer.anchors_wh, np.float32) / input_hw[::-1], (rows * columns, 1)).astype(np.float32)

    x = tf.reshape(x, (-1, rows * columns * anchors, 5 + layer.classes))
    xy, wh, confidences = tf.split(x, [2, 2, 1 + layer.classes], axis=-1)
    if layer.new_coords:
        size = tf.square(wh) * (4 * anchor_wh)
    else:
        xy, confidences = tf.sigmoid(xy), tf.sigmoid(confidences)
        size = tf.exp(wh) * anchor_wh
    centre = (xy * layer.scale_x_y - (layer.scale_x_y - 1) / 2 + cell_xy) / np.array([columns, rows], np.float32)
    boxes = tf.concat([centre - size / 2, centre + size / 2], axis=-1)
    return boxes, confidences[..., :1] * confidences[..., 1:]
