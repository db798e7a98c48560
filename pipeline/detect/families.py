"""Recognises detectors that a split of one output does not describe: YOLOX, YOLOv6, YOLO-NAS, DETR and RT-DETR.

| family | outputs | recognised by |
|---|---|---|
| YOLOX | `(N, M, 5 + C)`: offset from the cell, log size, objectness; BGR in 0..255 | the places of its boxes for noise |
| YOLOX, decoded | the same with cxcywh in pixels | the places, and an objectness |
| YOLOv6 | the same, RGB in 0..1 | an objectness that is 1 everywhere |
| YOLO-NAS | `(N, M, 4)` xyxy in pixels and `(N, M, C)` | shapes, and corners in order |
| DETR, YOLOS | `logits` `(N, Q, C + 1)` for softmax, `pred_boxes` cxcywh, shares | names, and the number of classes |
| RT-DETR, Deformable DETR | the same with C logits for sigmoid | names, and the number of classes |

DETR and its kin need no suppression. Sources:
https://github.com/Megvii-BaseDetection/YOLOX, `yolox/utils/demo_utils.py`, `yolox/data/data_augment.py`;
https://github.com/meituan/YOLOv6, `yolov6/models/effidehead.py`;
https://github.com/Deci-AI/super-gradients, `training/processing/processing.py`;
https://github.com/huggingface/transformers, the image processors of `models/detr` and `models/rt_detr`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.detect.packed_output import answer_to_noise, grid, grid_sizes
from pipeline.errors import ModelError

_FOLLOWS = 0.8  # correlation of boxes with their cells: those in pixels or shares have nearly 1, offsets nearly 0
_IN_ORDER = 0.99  # least share of boxes whose corners are in order
_YOLOX = {"value_range": (0.0, 255.0), "channel_order": "bgr", "letterbox_rule": "yolox", "box_units": "pixels"}
_QUERIES = {  # (queries, logits): activation and normalisation of the published COCO models
    (100, 92): ("softmax", "imagenet"),
    (300, 80): ("sigmoid", ""),
    (300, 91): ("sigmoid", "imagenet"),
}


_LAYOUTS = {
    "4+C,M": "YOLO of Ultralytics",
    "M,4+C": "RT-DETR of Ultralytics",
    "M,5+C": "YOLOv5, YOLOv6 or YOLOv7",
    "M,6": "YOLO of Ultralytics with suppression",
}


def family_of(metadata: DetectorMetadata) -> str:
    """The name of the family that a description fits, for a person."""
    if metadata.letterbox_rule == "yolox":
        return "YOLOX"
    if metadata.letterbox_rule == "super_gradients":
        return "YOLO-NAS"
    if metadata.boxes_output == "pred_boxes":
        like_rt_detr = "Deformable DETR" if metadata.normalisation else "RT-DETR"
        return "DETR or YOLOS" if metadata.score_activation == "softmax" else like_rt_detr
    if metadata.boxes_output == "detection_boxes":
        return "TF Object Detection API"
    if metadata.packed_layout == "M,4+C" and metadata.nms == "pipeline":
        return "YOLOv4 of tensorflow-yolov4-tflite"
    return _LAYOUTS.get(metadata.packed_layout, "a detector")


def of_one_box_a_cell(metadata: DetectorMetadata, rows: np.ndarray, given: Collection[str]) -> DetectorMetadata:
    """The metadata of a model with one box and an objectness for each cell, by its rows for noise: YOLOX or YOLOv6.

    Args:
      metadata: As far as known.
      rows: `(N, M, 5 + C)`.
      given: Fields that the config sets.
    """
    if metadata.packed_layout != "M,5+C" or rows.shape[1] not in grid_sizes(metadata.input_hw, 1):
        return metadata
    cells = grid(metadata.input_hw, rows.shape[1])[0].astype(float)
    follow = min(abs(np.corrcoef(rows[0, :, axis], cells[:, axis])[0, 1]) for axis in (0, 1)) if np.ptp(rows[0, :, :2]) else 0.0
    if follow < _FOLLOWS:
        found: dict[str, Any] = {**_YOLOX, "box_format": "grid"}
    elif np.median(np.abs(rows[0, :, :2])) <= 2 or np.allclose(rows[..., 4], 1):
        found = {}  # in shares, or YOLOv6
    else:
        found = _YOLOX
    return dataclasses.replace(metadata, **{field: value for field, value in found.items() if field not in given})


def two_outputs(outputs: Mapping[str, Any], input_hw: tuple[int, int]) -> dict[str, Any]:
    """Metadata of YOLO-NAS where there are its two outputs, with one box for each cell; else empty."""
    shapes = {name: tuple(spec.shape) for name, spec in outputs.items() if spec.shape.rank == 3}
    boxes = [name for name, shape in shapes.items() if shape[2] == 4]
    scores = [name for name, shape in shapes.items() if shape[2] != 4]
    sizes = {shape[1] for shape in shapes.values()}
    if (
        len(outputs) != 2
        or len(boxes) != 1
        or len(scores) != 1
        or len(sizes) != 1
        or not sizes <= grid_sizes(input_hw, 1) - {None}
    ):
        return {}
    return {
        "boxes_output": boxes[0],
        "scores_output": scores[0],
        "classes_output": "",
        "count_output": "",
        "box_format": "xyxy",
        "box_units": "pixels",
        "nms": "pipeline",
        "resize": "letterbox",
        "letterbox_rule": "super_gradients",
        "letterbox_value": 114,
    }


def check_two_outputs(signature: Any, metadata: DetectorMetadata, folder: str) -> None:
    """Checks on noise that boxes of a model taken for YOLO-NAS are corners in pixels.

    Raises:
      ModelError: They are not.
    """
    boxes = answer_to_noise(signature, metadata)[metadata.boxes_output].reshape(-1, 4)
    in_order = ((boxes[:, 2:] >= boxes[:, :2]).all(axis=1)).mean()
    if in_order < _IN_ORDER or np.median(np.abs(boxes)) <= 2:
        raise ModelError(
            f"model {folder}: has one box a cell in '{metadata.boxes_output}', but no corners in pixels as YOLO-NAS has; "
            "set model.box_format, model.box_units, model.resize and model.nms"
        )


def queries(outputs: Mapping[str, Any], given: Mapping[str, Any], classes: int, folder: str) -> dict[str, Any]:
    """Metadata of DETR and its kin, by the names of their outputs; else empty.

    Raises:
      ModelError: It is one, but the number of classes does not tell which.
    """
    scores = next((name for name in ("logits", "pred_logits") if name in outputs), "")
    if not scores or "pred_boxes" not in outputs or outputs[scores].shape.rank != 3:
        return {}
    _, many, logits = outputs[scores].shape
    activation, normalisation = _QUERIES.get((many, logits), ("", None))
    if classes:
        activation = {classes: "sigmoid", classes + 1: "softmax"}.get(logits, "")
        normalisation = "imagenet" if activation == "softmax" else normalisation
    activation, normalisation = given.get("score_activation", activation), given.get("normalisation", normalisation)
    if not activation or normalisation is None:
        raise ModelError(
            f"model {folder}: its outputs '{scores}' {(many, logits)} and 'pred_boxes' are those of DETR (softmax, imagenet), "
            "Deformable DETR (sigmoid, imagenet) or RT-DETR (sigmoid, ''); set model.score_activation and model.normalisation"
        )
    return {
        "boxes_output": "pred_boxes",
        "scores_output": scores,
        "classes_output": "",
        "count_output": "",
        "box_format": "cxcywh",
        "box_units": "norm",
        "nms": "model",
        "resize": "stretch",
        "score_activation": activation,
        "normalisation": normalisation,
    }
