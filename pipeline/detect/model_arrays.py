"""What a model takes and returns, whatever runs it: its signature, its inputs from uint8 images, and its outputs by role.

In NumPy, or with `tf.experimental.numpy` in a TensorFlow graph. `families.py` has the layouts of combined outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig

IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_FILTERED_DETECTIONS = 300
_STRIDES = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32), (16, 32))  # also with P6, with P2, and the tiny ones of YOLOv3 and v4

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output.

    Attributes:
      shape: With None for any size; None as a whole: of any shape.
      dtype: NumPy's name of its type.
      is_optional: Whether a call may leave it out.
    """

    shape: tuple[int | None, ...] | None
    dtype: str
    is_optional: bool = False

    @property
    def rank(self) -> int | None:
        """Number of axes; None if unknown."""
        return None if self.shape is None else len(self.shape)

    def fits(self, expected: Sequence[int | None]) -> bool:
        """Whether an array of the expected shape, with None for any size, may have this one."""
        return self.shape is None or (
            len(self.shape) == len(expected)
            and all(a is None or b is None or a == b for a, b in zip(self.shape, expected, strict=True))
        )


@dataclasses.dataclass(frozen=True)
class Signature:
    """A model's inputs and outputs.

    Attributes:
      inputs: By name; images `(N, H, W, 3)`.
      outputs: By name.
      run: Calls the model once.
      has_boolean_mask: Whether it picks rows of a whole batch by their values.
      channels_first: Whether the model itself takes images `(N, 3, H, W)`.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    run: Callable[[Arrays], Arrays]
    has_boolean_mask: bool = False
    channels_first: bool = False

    def by_role(self, pixels: np.ndarray, metadata: DetectorMetadata, detect: DetectConfig) -> Arrays:
        """Runs it on images `(N, H, W, 3) uint8`; returns the outputs as `split_metadata` describes them."""
        if self.channels_first:  # moved as bytes; arithmetic keeps the order in memory
            pixels = np.moveaxis(np.ascontiguousarray(np.moveaxis(pixels, -1, 1)), 1, -1)
        return split_outputs(self.run(feed_of(pixels, metadata, detect)), metadata)

    def batch_of(self, metadata: DetectorMetadata) -> int | None:
        """Images of each call, of a model of a fixed batch; None for any number. Images of different sizes make no batch."""
        return (self.inputs[metadata.input_name].shape or (None,))[0] or (1 if metadata.resize == "none" else None)


def channels_last(signature: Signature) -> Signature:
    """The same model with images `(N, H, W, 3)` where it takes `(N, 3, H, W)`."""
    moved = {}
    for name, one in signature.inputs.items():
        if one.shape is not None and len(one.shape) == 4 and one.shape[1] == 3 and one.shape[3] != 3:
            n, channels, height, width = one.shape
            moved[name] = dataclasses.replace(one, shape=(n, height, width, channels))

    def run(feed: Arrays) -> Arrays:
        moved_feed = {name: np.moveaxis(array, -1, 1) if name in moved else array for name, array in feed.items()}
        return signature.run({name: np.ascontiguousarray(array) if array.ndim else array for name, array in moved_feed.items()})

    return dataclasses.replace(signature, inputs={**signature.inputs, **moved}, run=run, channels_first=bool(moved))


def most_boxes(detect: DetectConfig) -> int:
    """Most boxes that a model which suppresses is asked for: more with a class filter, so that no other class crowds it out."""
    return max(detect.max_detections, _FILTERED_DETECTIONS) if detect.classes else detect.max_detections


def feed_of(pixels: Any, metadata: DetectorMetadata, detect: DetectConfig, xp: Any = np) -> dict[str, Any]:
    """The inputs of a model for images `(N, H, W, 3) uint8`: its range of values, its order of channels, and the thresholds.

    Args:
      pixels: An array, or a tensor.
      metadata: What the model expects.
      detect: Thresholds.
      xp: NumPy, or for a tensor `tf.experimental.numpy`.
    """
    images = pixels[..., ::-1] if metadata.channel_order == "bgr" else pixels
    if metadata.input_dtype == "float32":
        low, high = metadata.value_range
        images = xp.asarray(images, np.float32)
        if (low, high) != (0.0, 255.0):
            images *= np.float32((high - low) / 255.0)
        if low:
            images += np.float32(low)
        if metadata.normalisation:
            images = (images - np.array(IMAGENET_MEAN, np.float32)) / np.array(IMAGENET_DEVIATION, np.float32)
    feed = {metadata.input_name: images}
    if metadata.threshold_inputs:
        feed["score_threshold"] = xp.asarray(detect.score_threshold, np.float32)
        feed["iou_threshold"] = xp.asarray(detect.iou_threshold, np.float32)
        feed["max_detections"] = xp.asarray(most_boxes(detect), np.int32)
    return feed


def split_outputs(found: Mapping[str, Any], metadata: DetectorMetadata, xp: Any = np) -> dict[str, Any]:
    """A model's outputs by role, as `split_metadata` describes them: a combined one split, scores activated, grids decoded.

    Args:
      found: Outputs by name, arrays or tensors.
      metadata: What they mean.
      xp: As of `feed_of`.
    """
    names = {
        "boxes": metadata.boxes_output,
        "scores": metadata.scores_output,
        "classes": metadata.classes_output,
        "count": metadata.count_output,
    }
    outputs = {role: found[name] for role, name in names.items() if name}
    layout = metadata.packed_layout
    if layout:
        rows = xp.swapaxes(outputs["boxes"], 1, 2) if layout == "4+C,M" else outputs["boxes"]
        outputs = {"boxes": rows[..., :4], "scores": rows[..., 4:]}
        if layout == "M,6":
            outputs |= {"scores": rows[..., 4], "classes": rows[..., 5]}
    if metadata.score_activation:
        outputs["scores"] = _activated(outputs["scores"], metadata.score_activation, xp)
    if layout == "M,5+C":
        outputs["scores"] = outputs["scores"][..., :1] * outputs["scores"][..., 1:]
    if metadata.box_format == "grid":
        boxes = outputs["boxes"]
        corner, stride = (part.astype(np.float32) for part in grid(metadata.input_hw, boxes.shape[1]))
        outputs["boxes"] = xp.concatenate([boxes[..., :2] * stride + corner, xp.exp(boxes[..., 2:]) * stride], -1)
    return outputs


def _activated(scores: Any, activation: str, xp: Any) -> Any:
    with np.errstate(over="ignore"):
        if activation == "sigmoid":
            return 1 / (1 + xp.exp(-scores))
        powers = xp.exp(scores - xp.max(scores, -1, keepdims=True))
        return (powers / xp.sum(powers, -1, keepdims=True))[..., :-1]


def split_metadata(metadata: DetectorMetadata) -> DetectorMetadata:
    """The metadata of outputs that `split_outputs` has split, named by their roles."""
    return dataclasses.replace(
        metadata,
        packed_layout="",
        score_activation="",
        box_format="cxcywh" if metadata.box_format == "grid" else metadata.box_format,
        boxes_output="boxes",
        scores_output="scores",
        classes_output="classes" if metadata.classes_output or metadata.packed_layout == "M,6" else "",
        count_output="count" if metadata.count_output and not metadata.packed_layout else "",
    )


def grid_sizes(input_hw: tuple[int, int], anchors: int) -> set[int | None]:
    """Possible numbers of boxes of an export without suppression, with so many for each cell; None stands for any number."""
    return {None, *(anchors * cells for cells in _cells(input_hw))}


def grid(input_hw: tuple[int, int], many: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The cells of a head's grids in its order, row by row, the finest first: left and top `(M, 2)` and stride `(M, 1)`, pixels.

    Args:
      input_hw: Height and width of the model's input, pixels.
      many: How many cells; with a None or a number that no known strides have, those of strides 8, 16 and 32.
    """
    height, width = input_hw
    rows = [
        np.insert(np.indices((height // stride, width // stride))[::-1].reshape(2, -1).T * stride, 2, stride, axis=1)
        for stride in _cells(input_hw).get(many or 0, _STRIDES[0])
    ]
    return np.concatenate(rows)[:, :2], np.concatenate(rows)[:, 2:]


def _cells(input_hw: tuple[int, int]) -> dict[int, tuple[int, ...]]:
    """Strides by the number of cells that they make."""
    height, width = input_hw
    return {sum((height // stride) * (width // stride) for stride in strides): strides for strides in _STRIDES}
