"""Outputs that need a step before they are boxes and confidences: splits one that combines both, and activates scores.

`families.py` has the layouts and who exports them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from models.export import CANDIDATES, suppress
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig

_STRIDES = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32), (16, 32))  # also with P6, with P2, and the tiny ones of YOLOv3 and v4


def grid_sizes(input_hw: tuple[int, int], anchors: int) -> set[int | None]:
    """Possible numbers of boxes of an export without suppression, with so many for each cell; None stands for any number."""
    height, width = input_hw
    return {None, *(anchors * sum((height // stride) * (width // stride) for stride in strides) for strides in _STRIDES)}


def grid(input_hw: tuple[int, int], many: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The cells of a head's grids in its order, row by row, the finest first: left and top `(M, 2)` and stride `(M, 1)`, pixels.

    Args:
      input_hw: Height and width of the model's input, pixels.
      many: How many cells; with a None or a number that no known strides have, those of strides 8, 16 and 32.
    """
    height, width = input_hw
    cells = {sum((height // stride) * (width // stride) for stride in strides): strides for strides in _STRIDES}
    rows = [
        np.insert(np.indices((height // stride, width // stride))[::-1].reshape(2, -1).T * stride, 2, stride, axis=1)
        for stride in cells.get(many or 0, _STRIDES[0])
    ]
    return np.concatenate(rows)[:, :2], np.concatenate(rows)[:, 2:]


def expected_shape(metadata: DetectorMetadata) -> tuple[int | None, ...]:
    """The shape of a joined output by its layout and class names; None for an axis of any size."""
    classes = len(metadata.class_names)
    first, _, last = metadata.packed_layout.partition(",")
    axes = {"M": None, "4+C": 4 + classes if classes else None, "5+C": 5 + classes if classes else None, "6": 6}
    return None, axes[first], axes[last]


def is_parted(metadata: DetectorMetadata) -> bool:
    """Whether `part` makes boxes and confidences of the model's outputs."""
    is_raw = metadata.box_format == "grid" or metadata.signature == CANDIDATES
    return is_raw or bool(metadata.packed_layout or metadata.score_activation)


def part(found: Mapping[str, Any], metadata: DetectorMetadata, detect: DetectConfig, most: int) -> dict[str, Any]:
    """Splits a joined output, or activates scores, and suppresses boxes in the graph, so that no image pays for all candidates.

    Args:
      found: Outputs of the model, by name.
      metadata: What the model returns.
      detect: Thresholds.
      most: Most boxes of an image.

    Returns:
      Outputs by role.
    """
    import tensorflow as tf

    boxes, scores = (tf.cast(found[name], tf.float32) for name in (metadata.boxes_output, metadata.scores_output))
    if metadata.packed_layout:
        rows = tf.transpose(boxes, [0, 2, 1]) if metadata.packed_layout == "4+C,M" else boxes
        boxes = rows[..., :4]
        if metadata.packed_layout == "M,6":
            return {"boxes": boxes, "scores": rows[..., 4], "classes": rows[..., 5]}
        scores = rows[..., 4:]
    if metadata.score_activation:
        scores = tf.sigmoid(scores) if metadata.score_activation == "sigmoid" else tf.nn.softmax(scores)[..., :-1]
    if metadata.packed_layout == "M,5+C":
        scores = scores[..., :1] * scores[..., 1:]
    iou_threshold = detect.iou_threshold if metadata.nms == "pipeline" else 1.0  # no box overlaps another more
    suppressed = suppress(
        _to_xyxy(boxes, metadata),
        scores,
        tf.constant(detect.score_threshold, tf.float32),
        tf.constant(iou_threshold, tf.float32),
        tf.constant(most, tf.int32),
        several_labels=detect.labels_per_box == "several",
    )
    return {"count" if name == "num_detections" else name: value for name, value in suppressed.items()}


def _to_xyxy(boxes: Any, metadata: DetectorMetadata) -> Any:
    """As `geometry.boxes_to_xyxy`, of tensors."""
    import tensorflow as tf

    if metadata.box_format == "grid":
        corner, stride = (tf.constant(value, tf.float32) for value in grid(metadata.input_hw, boxes.shape[1]))
        boxes = tf.concat([boxes[..., :2] * stride + corner, tf.exp(boxes[..., 2:]) * stride], -1)
    a, b, c, d = tf.unstack(boxes, axis=-1)
    edges = {
        "xyxy": (a, b, c, d),
        "yxyx": (b, a, d, c),
        "xywh": (a, b, a + c, b + d),
        "cxcywh": (a - c / 2, b - d / 2, a + c / 2, b + d / 2),
    }
    return tf.stack(edges[metadata.box_format.replace("grid", "cxcywh")], axis=-1)


def parted(metadata: DetectorMetadata) -> DetectorMetadata:
    """The metadata of a model whose outputs `part` has split."""
    apart = dataclasses.replace(
        metadata, packed_layout="", score_activation="", boxes_output="boxes", scores_output="scores", classes_output="classes"
    )
    if metadata.packed_layout == "M,6":
        return apart
    return dataclasses.replace(apart, count_output="num_detections", box_format="xyxy", nms="model")
