"""YOLO exports with one joined output: finds its layout, and splits it into boxes, scores and classes.

What exporters write, by their sources:

| exporter | layout | boxes | suppressed |
|---|---|---|---|
| Ultralytics YOLOv8 and later | `(N, 4 + C, M)` | cxcywh, pixels; shares where made on the way to TFLite | no |
| the same with `nms=True`, or end to end (v10, v26) | `(N, M, 6)` | xyxy, then confidence and class | yes |
| YOLOv5's `export.py`, YOLOv7 | `(N, M, 5 + C)`: an objectness before the classes | cxcywh, shares | no |
| RT-DETR of Ultralytics | `(N, 300, 4 + C)` | cxcywh, shares | needs none |
| YOLOv4 of tensorflow-yolov4-tflite | `(N, M, 4 + C)`, M as many as pass its threshold | yxyx, shares | no |

All take float32 RGB `(N, H, W, 3)` in 0..1: the last two stretched, the others letterboxed with grey 114. `metadata.yaml` beside
the graph has `task`, `names` and `imgsz`. An export without suppression has one candidate for each cell of its grids (strides 8,
16, 32), YOLOv5 three; so the shape mostly shows which axis is which. A shape does not show units: they are measured.

Sources: https://github.com/ultralytics/ultralytics, `ultralytics/engine/exporter.py` (`Exporter`, `NMSModel`),
`nn/modules/head.py` (`Detect`), `nn/backends/tensorflow.py`, `data/augment.py` (`LetterBox`);
https://github.com/ultralytics/yolov5, `models/tf.py` (`TFDetect`);
https://github.com/hunglc007/tensorflow-yolov4-tflite, `core/yolov4.py` (`filter_boxes`), `detect.py`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import yaml

from models.export import CANDIDATES, suppress
from models.metadata import BoxUnits, DetectorMetadata, JoinedLayout
from pipeline.config import DetectConfig
from pipeline.errors import ModelError

LAYOUTS = tuple(layout for layout in get_args(JoinedLayout) if layout)
_METADATA_PATH = "metadata.yaml"
_LETTERBOX_GREY = 114
_STRIDES = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32), (16, 32))  # also with P6, with P2, and the tiny ones of YOLOv3 and v4
_ROUNDED = 0.01  # beyond 0 and 1: no confidence
_LARGEST_SHARE = 2.0  # if the median box reaches beyond this, its unit is pixels


@dataclasses.dataclass(frozen=True, slots=True)
class ExportNotes:
    """An export's `metadata.yaml`.

    Attributes:
      class_names: In the order of the class ids.
      input_hw: Height and width of the input, pixels; None if missing.
    """

    class_names: tuple[str, ...] = ()
    input_hw: tuple[int, int] | None = None


def read_notes(local: str, folder: str) -> ExportNotes:
    """Reads the `metadata.yaml` of a SavedModel; empty notes if it has none.

    Args:
      local: The SavedModel on this machine.
      folder: Its name in messages.

    Raises:
      ModelError: The file is malformed, or the model's task is not detection.
    """
    try:
        with open(os.path.join(local, _METADATA_PATH), encoding="utf-8") as file:
            said = yaml.safe_load(file)
    except FileNotFoundError:
        return ExportNotes()
    except (OSError, ValueError, yaml.YAMLError) as err:
        raise ModelError(f"model {folder}: {_METADATA_PATH} cannot be read: {' '.join(str(err).split())[:300]}") from err
    if not isinstance(said, dict):
        raise ModelError(f"model {folder}: expected keys and values in {_METADATA_PATH}, got {type(said).__name__}")
    if (task := said.get("task", "detect")) != "detect":
        raise ModelError(f"model {folder}: expected a model that detects, {_METADATA_PATH} says its task is '{task}'")
    try:
        return ExportNotes(_names(said.get("names", ())), _input_hw(said.get("imgsz")))
    except (TypeError, ValueError, KeyError) as err:
        raise ModelError(
            f"model {folder}: expected class names by number from 0 as names and [height, width] as imgsz in {_METADATA_PATH}"
        ) from err


def _names(said: Any) -> tuple[str, ...]:
    names = [said[number] for number in range(len(said))]
    return tuple(str(name) for name in names)


def _input_hw(said: Any) -> tuple[int, int] | None:
    if said is None:
        return None
    height, width = (said, said) if isinstance(said, int) else said
    return int(height), int(width)


def is_packed(outputs: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether an output joins boxes and classes: by the config, or if it is the only output, has three axes and is wide enough.

    Args:
      outputs: Of the signature.
      given: The config's description of the model.
    """
    if "packed_layout" in given:
        return True
    shapes = [spec.shape for spec in outputs.values()]
    return len(shapes) == 1 and shapes[0].rank == 3 and all(size is None or size > 4 for size in shapes[0][1:])


def has_masks(outputs: Mapping[str, Any]) -> bool:
    """Whether the outputs are those of a YOLO that segments: a joined one, and prototypes of masks `(N, H, W, 32)`."""
    return sorted(spec.shape.rank or 0 for spec in outputs.values()) == [3, 4]


def layout_of(sizes: tuple[int | None, int | None], input_hw: tuple[int, int], classes: int) -> JoinedLayout:
    """The layout of a joined output, by its shape; empty if several match.

    Args:
      sizes: Of its second and third axis; None if unknown.
      input_hw: Height and width of the model's input, pixels.
      classes: How many classes the model has; 0 if unknown.
    """
    fitting = _fitting(sizes, classes, grid_sizes(input_hw, 1), grid_sizes(input_hw, 3))
    if not fitting and classes:  # other strides, or only the best few candidates: the width must tell
        fitting = _fitting(sizes, classes, {*sizes}, {*sizes})
    return fitting[0] if len(fitting) == 1 else ""


def _fitting(
    sizes: tuple[int | None, int | None], classes: int, single: set[int | None], triple: set[int | None]
) -> list[JoinedLayout]:
    """The layouts that match a shape; `single`, `triple`: possible numbers of boxes with one or three for each cell."""
    first, last = sizes
    found: list[JoinedLayout] = []
    if last in single and _is_wide_as(first, 4, classes):
        found.append("4+C,M")
    if first in single and _is_wide_as(last, 4, classes):
        found.append("M,4+C")
    if first in single | triple and _is_wide_as(last, 5, classes):
        found.append("M,5+C")
    if last == 6 and (first is None or first not in single | triple):
        found.append("M,6")
    return found


def _is_wide_as(width: int | None, without_classes: int, classes: int) -> bool:
    return width is not None and (width == without_classes + classes if classes else width > without_classes)


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


def picks_rows(signature: Any) -> bool:
    """Whether a signature's graph picks rows by their values, with `tf.boolean_mask` or the like."""
    graph = signature.graph.as_graph_def()
    return any(node.op == "Where" for nodes in (graph.node, *(f.node_def for f in graph.library.function)) for node in nodes)


def guess(name: str, layout: JoinedLayout, *, picked: bool = False, best: bool = False) -> dict[str, Any]:
    """Metadata of a model of this layout, by its exporters' sources; mostly without the units of its boxes.

    Args:
      name: Of its output.
      layout: Of its output.
      picked: Whether it has only the candidates that pass a threshold of its own.
      best: Whether it has a fixed number of the best: RT-DETR.
    """
    if best and layout == "M,4+C":
        return {**guess(name, layout), "resize": "stretch", "nms": "model"}
    if picked and layout == "M,4+C":
        return {**guess(name, layout), "resize": "stretch", "box_format": "yxyx", "box_units": "norm"}
    suppressed = layout == "M,6"
    return {
        "resize": "letterbox",
        "letterbox_value": _LETTERBOX_GREY,
        "letterbox_rule": "ultralytics",
        "boxes_output": name,
        "scores_output": name,
        "classes_output": "",
        "count_output": "",
        "box_format": "xyxy" if suppressed else "cxcywh",
        "nms": "model" if suppressed else "pipeline",
        "packed_layout": layout,
    }


def answer_to_noise(signature: Any, metadata: DetectorMetadata) -> dict[str, np.ndarray]:
    """The model's outputs for an image of noise, by name."""
    import tensorflow as tf

    spec = signature.structured_input_signature[1][metadata.input_name]
    noise = np.random.default_rng(0).uniform(*metadata.value_range, (spec.shape[0] or 1, *metadata.input_hw, 3))
    return {name: value.numpy() for name, value in signature(**{metadata.input_name: tf.cast(noise, spec.dtype)}).items()}


def joined_rows(signature: Any, metadata: DetectorMetadata) -> np.ndarray:
    """The rows `(N, M, …)` of a joined output for an image of noise."""
    joined = answer_to_noise(signature, metadata)[metadata.boxes_output]
    return np.swapaxes(joined, 1, 2) if metadata.packed_layout == "4+C,M" else joined


def measured_units(rows: np.ndarray, metadata: DetectorMetadata) -> BoxUnits | None:
    """The units of a model's boxes by its rows for noise; None if it returns no boxes.

    Candidates without suppression lie all over the input, and a suppressed output has its best few even at low confidences. So
    their median is far above 2 in pixels, and below 2 in shares.
    """
    corners_or_centre = rows[..., : 4 if metadata.packed_layout == "M,6" else 2]
    largest = np.abs(corners_or_centre).max(axis=-1)
    seen = largest[np.isfinite(largest) & (largest > 0)]  # unused rows are zeros
    if not seen.size:
        return None
    return "norm" if np.median(seen) <= _LARGEST_SHARE else "pixels"


def has_other_numbers(rows: np.ndarray, metadata: DetectorMetadata) -> bool:
    """Whether the rows have more than boxes and confidences: key points, masks, angles, or scores without their activation."""
    confidences = rows[..., 4:5] if metadata.packed_layout == "M,6" else rows[..., 4:]
    return not metadata.score_activation and bool(((confidences < -_ROUNDED) | (confidences > 1 + _ROUNDED)).any())


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
