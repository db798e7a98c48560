"""What a model takes and returns, whatever runs it: its signature, its inputs from uint8 images, and its outputs by role.

The steps before and behind a network are written once. They run in NumPy for a model on a server, in a TensorFlow graph with
`tf.experimental.numpy`, and in an ONNX graph with `onnx_graph.Steps`. `families.py` has the layouts of combined outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig

IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_FILTERED_DETECTIONS = 300
PICKED = 300  # most boxes of an image that a device picks; as many as most detectors return that suppress themselves
PICKS = ("picked_boxes", "picked_scores", "picked_classes", "picked_places", "passed")  # roles of what a device picks
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
        return signature.run(
            {name: np.ascontiguousarray(np.moveaxis(array, -1, 1)) if name in moved else array for name, array in feed.items()}
        )

    return dataclasses.replace(signature, inputs={**signature.inputs, **moved}, run=run, channels_first=bool(moved))


def most_boxes(detect: DetectConfig) -> int:
    """Most boxes that a model which suppresses is asked for: more with a class filter, so that no other class crowds it out."""
    return max(detect.max_detections, _FILTERED_DETECTIONS) if detect.classes else detect.max_detections


def feed_of(pixels: Any, metadata: DetectorMetadata, detect: DetectConfig, xp: Any = np, dtype: str = "") -> dict[str, Any]:
    """The inputs of a model for images `(N, H, W, 3) uint8`: its range of values, its order of channels, and the thresholds.

    Args:
      pixels: An array, or a tensor.
      metadata: What the model expects.
      detect: Thresholds.
      xp: NumPy, or for a tensor `tf.experimental.numpy`, or for a value of an ONNX graph `onnx_graph.Steps`.
      dtype: Of the images, where it is another one than in the metadata.
    """
    images = pixels[..., ::-1] if metadata.channel_order == "bgr" else pixels
    if metadata.input_dtype == "float32":
        low, high = metadata.value_range
        images = xp.asarray(images, "float32")
        if (low, high) != (0.0, 255.0):
            images *= np.float32((high - low) / 255.0)
        if low:
            images += np.float32(low)
        if metadata.normalisation:
            images = (images - np.array(IMAGENET_MEAN, np.float32)) / np.array(IMAGENET_DEVIATION, np.float32)
        if dtype and dtype != "float32":
            images = xp.asarray(images, dtype)
    feed = {metadata.input_name: images}
    if metadata.threshold_inputs:
        feed["score_threshold"] = xp.asarray(np.float32(detect.score_threshold), "float32")
        feed["iou_threshold"] = xp.asarray(np.float32(detect.iou_threshold), "float32")
        feed["max_detections"] = xp.asarray(np.int32(most_boxes(detect)), "int32")
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
    outputs |= {role: xp.asarray(outputs[role], "float32") for role in ("boxes", "scores")}  # also of a float16 model
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


def has_candidates(signature: Signature, metadata: DetectorMetadata) -> bool:
    """Whether the boxes of a model are candidates: scores of all classes, or boxes that the pipeline suppresses.

    Others are the answer of a model that has picked, suppressed and classified them itself.
    """
    if metadata.packed_layout or metadata.classes_output:
        return metadata.packed_layout not in ("", "M,6")
    scores = signature.outputs[metadata.scores_output]
    return scores.rank == 3 or (scores.rank == 2 and metadata.nms == "pipeline")


def candidates_of(outputs: Arrays, metadata: DetectorMetadata, detect: DetectConfig) -> Arrays:
    """The candidates among all boxes of a batch, those that passed the threshold, in the order of the model's boxes.

    Args:
      outputs: `boxes (n, M, 4)`, `scores (n, M)` or `(n, M, C)`, and where it is known already `best (n, M)`, the best score of
        each box.
      metadata: Has the number of the first class.
      detect: Threshold, and whether a box may have several classes.

    Returns:
      `boxes (n, K, 4) float32`, `scores (n, K) float32` and `classes (n, K) int32`, where K is the most of an image, and `count
      (n,)`, how many of them each image has.
    """
    boxes, scores = outputs["boxes"], outputs["scores"]
    several = scores.ndim == 3 and detect.labels_per_box == "several"
    if len(boxes) == 1 and not several:  # as with OpenVINO: nothing to lay side by side
        best = outputs["best"] if "best" in outputs else scores.max(axis=-1) if scores.ndim == 3 else scores
        rows = np.flatnonzero(best[0] >= detect.score_threshold)
        ids = scores[0, rows].argmax(axis=-1) if scores.ndim == 3 else np.zeros(len(rows), np.int32)
        ids = (ids + metadata.class_id_offset).astype(np.int32)
        return {"boxes": boxes[:, rows], "scores": best[:, rows], "classes": ids[None], "count": np.array([len(rows)])}
    if several:
        of, rows, classes = np.nonzero(scores >= detect.score_threshold)
        sure = scores[of, rows, classes]
    else:
        best = outputs.get("best", scores) if scores.ndim == 2 or "best" in outputs else scores.max(axis=-1)
        of, rows = np.nonzero(best >= detect.score_threshold)
        sure = best[of, rows]
        classes = scores[of, rows].argmax(axis=-1) if scores.ndim == 3 else np.zeros(len(of), np.int32)
    count = np.bincount(of, minlength=len(boxes))
    shape = len(boxes), int(count.max(initial=0))
    places = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    found = {
        "boxes": np.zeros((*shape, 4), np.float32),
        "scores": np.zeros(shape, np.float32),
        "classes": np.zeros(shape, np.int32),
    }
    found["boxes"][of, places], found["scores"][of, places], found["classes"][of, places] = boxes[of, rows], sure, classes
    found["classes"] += metadata.class_id_offset
    return {**found, "count": count}


def picked_candidates(read: Callable[[str], np.ndarray], metadata: DetectorMetadata, detect: DetectConfig) -> Arrays:
    """The candidates of a batch of whose boxes a device has picked the best `PICKED`; see `candidates_of`.

    All boxes stay on the device, and are read only where more have passed in an image.

    Args:
      read: Reads an output: `passed (n,)`, how many passed the threshold; the best as `picked_boxes (n, K, 4)`, `picked_scores`,
        `picked_classes` and `picked_places (n, K)`, their place among all; or what `candidates_of` takes.
      metadata: As of `candidates_of`.
      detect: As of `candidates_of`.
    """
    passed, places = read("passed"), read("picked_places")
    most = int(passed.max(initial=0))
    if most > places.shape[1]:
        found = {role: read(role) for role in ("boxes", "scores")}
        with contextlib.suppress(KeyError):
            found["best"] = read("best")
        return candidates_of(found, metadata, detect)
    left = np.arange(most) >= passed[:, None]
    order = np.argsort(np.where(left, np.iinfo(places.dtype).max, places[:, :most]), axis=1, kind="stable")  # devices order ties
    images = np.arange(len(order))[:, None]
    boxes, scores, classes = (read(f"picked_{role}")[images, order] for role in ("boxes", "scores", "classes"))
    return {"boxes": boxes, "scores": scores, "classes": classes.astype(np.int32) + metadata.class_id_offset, "count": passed}


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
