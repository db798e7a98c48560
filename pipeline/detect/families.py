"""Recognises detectors that do not describe themselves, by one table of families.

`detect-objects import` writes what is recognised into the model (`models.metadata`), and jobs read it there. A job recognises a
SavedModel of others by the same table. A family is told by names and shapes of outputs, and by the outputs for an image of noise;
docs/models.md lists them.

An export without suppression has one candidate for each cell of its grids (strides 8, 16, 32), YOLOv5 three; so the shape mostly
shows which axis is which. A shape does not show units: they are measured. DETR and its kin need no suppression.

Sources: https://github.com/tensorflow/models, `research/object_detection/exporter_lib_v2.py`;
https://github.com/huggingface/transformers, the image processors of `models/detr` and `models/rt_detr`;
https://github.com/Deci-AI/super-gradients, `training/processing/processing.py`;
https://github.com/ultralytics/ultralytics, `ultralytics/engine/exporter.py` (`Exporter`, `NMSModel`), `nn/modules/head.py`
(`Detect`), `nn/backends/tensorflow.py`, `data/augment.py` (`LetterBox`);
https://github.com/ultralytics/yolov5, `models/tf.py` (`TFDetect`);
https://github.com/meituan/YOLOv6, `yolov6/models/effidehead.py`;
https://github.com/Megvii-BaseDetection/YOLOX, `yolox/utils/demo_utils.py`, `yolox/data/data_augment.py`;
https://github.com/hunglc007/tensorflow-yolov4-tflite, `core/yolov4.py` (`filter_boxes`), `detect.py`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import numpy as np
import yaml

from models.metadata import BoxUnits, DetectorMetadata, JoinedLayout
from pipeline.detect.model_arrays import Signature, Tensor, grid, grid_sizes

THRESHOLDS = ("score_threshold", "iou_threshold", "max_detections")
_METADATA_PATH = "metadata.yaml"
_DEFAULT_HW = (640, 640)  # of models that take images of any size
_LAYOUTS = tuple(layout for layout in get_args(JoinedLayout) if layout)
_ROUNDED = 0.01  # beyond 0 and 1: no confidence
_LARGEST_SHARE = 2.0  # if the median box reaches beyond this, its unit is pixels
_FOLLOWS = 0.8  # correlation of boxes with their cells: those in pixels or shares have nearly 1, offsets nearly 0
_IN_ORDER = 0.99  # least share of boxes whose corners are in order


class Family(NamedTuple):
    """What the models of a family have in common.

    Attributes:
      name: For a person.
      marks: Fields of the metadata by which a description is one of this family.
      fields: Its other fields.
    """

    name: str
    marks: Mapping[str, Any]
    fields: Mapping[str, Any]


_LETTERBOX = {"resize": "letterbox", "letterbox_value": 114, "letterbox_rule": "ultralytics"}
_BOXES = {"classes_output": "", "count_output": ""}  # and scores of each class
_YOLO = {**_LETTERBOX, **_BOXES, "box_format": "cxcywh", "nms": "pipeline"}
_DETR = {**_BOXES, "box_format": "cxcywh", "box_units": "norm", "nms": "model", "resize": "stretch", "antialias": True}
_API = Family(
    "TF Object Detection API",
    {"boxes_output": "detection_boxes"},
    {
        "scores_output": "detection_scores",
        "classes_output": "detection_classes",
        "count_output": "num_detections",
        "box_format": "yxyx",
        "class_id_offset": 1,
        "threshold_inputs": False,
        "value_range": (0.0, 255.0),
    },
)
_YOLOX = Family(
    "YOLOX", {"letterbox_rule": "yolox"}, {"value_range": (0.0, 255.0), "channel_order": "bgr", "box_units": "pixels"}
)
_YOLO_NAS = Family("YOLO-NAS", {"letterbox_rule": "super_gradients"}, {**_YOLO, "box_format": "xyxy", "box_units": "pixels"})
_BEST_300 = Family("RT-DETR of Ultralytics", {"packed_layout": "M,4+C", "nms": "model"}, {**_YOLO, "resize": "stretch"})
_PICKED = Family(
    "YOLOv4 of tensorflow-yolov4-tflite",
    {"packed_layout": "M,4+C", "box_format": "yxyx"},
    {**_YOLO, "resize": "stretch", "box_units": "norm"},
)
FAMILIES = (
    _API,
    _YOLOX,
    _YOLO_NAS,
    Family("DETR or YOLOS", {"boxes_output": "pred_boxes", "score_activation": "softmax"}, _DETR),
    Family("Deformable DETR", {"boxes_output": "pred_boxes", "normalisation": "imagenet"}, _DETR),
    Family("RT-DETR", {"boxes_output": "pred_boxes"}, _DETR),
    _BEST_300,
    _PICKED,
    Family("YOLO of Ultralytics with its boxes in rows", {"packed_layout": "M,4+C"}, _YOLO),
    Family("YOLO of Ultralytics", {"packed_layout": "4+C,M"}, _YOLO),
    Family("YOLOv5, YOLOv6 or YOLOv7", {"packed_layout": "M,5+C"}, _YOLO),
    Family("YOLO of Ultralytics with suppression", {"packed_layout": "M,6"}, {**_YOLO, "box_format": "xyxy", "nms": "model"}),
)
_PUBLISHED = {(100, 92): ("softmax", "imagenet"), (300, 80): ("sigmoid", ""), (300, 91): ("sigmoid", "imagenet")}
"""Activation and normalisation of DETR and its kin on COCO, by (queries, logits)."""


def family_of(metadata: DetectorMetadata) -> str:
    """The name of the family that a description fits, for a person."""
    fitting = (each.name for each in FAMILIES if each.marks.items() <= dataclasses.asdict(metadata).items())
    return next(fitting, "a detector")


class ExportNotes(NamedTuple):
    """An Ultralytics export's `metadata.yaml`.

    Attributes:
      class_names: In the order of the class ids.
      input_hw: Height and width of the input, pixels; None if missing.
    """

    class_names: tuple[str, ...] = ()
    input_hw: tuple[int, int] | None = None


def read_notes(local: str) -> ExportNotes:
    """Reads the `metadata.yaml` of a SavedModel on this machine; empty notes if it has none.

    Raises:
      ValueError: The file is malformed, or the model's task is not detection.
    """
    path = os.path.join(local, _METADATA_PATH)
    if not os.path.exists(path):
        return ExportNotes()
    try:
        with open(path, encoding="utf-8") as file:
            said = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as err:
        raise ValueError(f"{_METADATA_PATH} cannot be read: {' '.join(str(err).split())[:300]}") from err
    return notes_from(said, _METADATA_PATH)


def notes_from(said: Any, where: str) -> ExportNotes:
    """An export's notes: those of `metadata.yaml`, or the properties of an ONNX file.

    Raises:
      ValueError: They are malformed, or the model's task is not detection.
    """
    if not isinstance(said, dict):
        raise ValueError(f"expected keys and values in {where}, got {type(said).__name__}")
    if (task := said.get("task", "detect")) != "detect":
        raise ValueError(f"expected a model that detects, {where} says its task is '{task}'")
    try:
        names, size = said.get("names", ()), said.get("imgsz")
        height, width = (size, size) if isinstance(size, int) else size or (0, 0)
        return ExportNotes(tuple(str(names[number]) for number in range(len(names))), (int(height), int(width)) if size else None)
    except (TypeError, ValueError, KeyError) as err:
        raise ValueError(f"expected class names by number from 0 as names and [height, width] as imgsz in {where}") from err


def recognise(signature: Signature, given: Mapping[str, Any], notes: ExportNotes) -> dict[str, Any]:
    """The metadata of a model by its signature, as far as its shapes show it.

    Args:
      signature: The model's inputs and outputs.
      given: What the config says of the model, which wins later.
      notes: Of an export of Ultralytics.

    Raises:
      ValueError: The model segments, or its outputs fit several families.
    """
    inputs, outputs = signature.inputs, signature.outputs
    name, spec = next(((name, spec) for name, spec in inputs.items() if spec.rank == 4), ("images", None))
    hw = spec.shape[1:3] if spec is not None and spec.shape else (None, None)
    any_size = spec is not None and hw == (None, None) and not (notes.input_hw or given.get("input_hw"))
    dtype = "float32" if spec is not None and spec.dtype in ("float32", "float16") else "uint8"
    fields: dict[str, Any] = {
        "input_hw": hw if None not in hw else notes.input_hw or _DEFAULT_HW,
        "resize": "none" if any_size else "stretch",
        "class_names": notes.class_names,
        "signature": "serving_default",
        "input_name": name,
        "input_dtype": dtype,
        "value_range": (0.0, 255.0) if dtype == "uint8" else (0.0, 1.0),
        "classes_output": "classes" if "classes" in outputs else "",
        "count_output": "num_detections" if "num_detections" in outputs else "",
        "nms": "model",
        "threshold_inputs": inputs.keys() >= {*THRESHOLDS},  # as this project exports them
    }
    known = {**fields, **given}
    if _API.marks["boxes_output"] in outputs:
        return {**fields, **_API.fields, **_API.marks}
    if sorted(each.rank or 0 for each in outputs.values()) == [3, 4]:  # a combined output, and prototypes of masks
        raise ValueError("expected a model that detects, its outputs are those of one that segments: boxes and masks")
    if detr := _match_detr(outputs, given, len(known["class_names"])):
        if any_size and "resize" not in given:
            raise ValueError("takes images of any size, which DETR makes smaller before; set model.input_hw")
        return {**fields, **detr}
    return {**fields, **(_match_yolo_nas(outputs, known["input_hw"]) or _match_combined(signature, known, given))}


def _match_detr(outputs: Mapping[str, Tensor], given: Mapping[str, Any], classes: int) -> dict[str, Any]:
    """Fields of DETR and its kin, by the names of their outputs; empty for others."""
    scores = next((name for name in ("logits", "pred_logits") if name in outputs), "")
    shape = outputs[scores].shape if scores else None
    if "pred_boxes" not in outputs or not shape or len(shape) != 3:
        return {}
    _, many, logits = shape
    activation, normalisation = _PUBLISHED.get((many or 0, logits or 0), ("", None))
    if classes:
        activation = {classes: "sigmoid", classes + 1: "softmax"}.get(logits or 0, "")
        normalisation = "imagenet" if activation == "softmax" else normalisation
    activation, normalisation = given.get("score_activation", activation), given.get("normalisation", normalisation)
    if not activation or normalisation is None:
        raise ValueError(
            f"its outputs '{scores}' {(many, logits)} and 'pred_boxes' are those of DETR (softmax, imagenet), "
            "Deformable DETR (sigmoid, imagenet) or RT-DETR (sigmoid, ''); set model.score_activation and model.normalisation"
        )
    named = {"boxes_output": "pred_boxes", "scores_output": scores}
    return {**_DETR, **named, "score_activation": activation, "normalisation": normalisation}


def _match_yolo_nas(outputs: Mapping[str, Tensor], input_hw: tuple[int, int]) -> dict[str, Any]:
    """Fields of YOLO-NAS where there are its two outputs, with one box for each cell; empty for others."""
    shapes = {name: spec.shape for name, spec in outputs.items() if spec.shape and spec.rank == 3}
    boxes = [name for name, shape in shapes.items() if shape[2] == 4]
    scores = [name for name, shape in shapes.items() if shape[2] != 4]
    sizes = {shape[1] for shape in shapes.values()}
    counts = (len(outputs), len(boxes), len(scores), len(sizes))
    if counts != (2, 1, 1, 1) or not sizes <= grid_sizes(input_hw, 1) - {None}:
        return {}
    return {**_YOLO_NAS.fields, **_YOLO_NAS.marks, "boxes_output": boxes[0], "scores_output": scores[0]}


def _match_combined(signature: Signature, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a YOLO that has boxes and confidences in one output, the only one, or by the config; empty for others."""
    outputs = signature.outputs
    shapes = [spec.shape or () for spec in outputs.values()]
    is_wide = len(shapes) == 1 and len(shapes[0]) == 3 and all(size is None or size > 4 for size in shapes[0][1:])
    name = known.get("boxes_output") or next(iter(outputs), "")
    if not (is_wide or "packed_layout" in given) or name not in outputs:
        return {}  # a later check reports a missing output
    shape = outputs[name].shape or (None, None, None)
    if shape[1:] == (None, None) and known["resize"] != "none":  # a file for inputs of any size may not tell; its answer does
        shape = _answered(signature, known)[name].shape
    layout = known.get("packed_layout") or layout_of((shape[1], shape[2]), known["input_hw"], len(known["class_names"]))
    if not layout:
        raise ValueError(
            f"the one output '{name}' {shape} has all that is said of M boxes and C classes, but its shape alone "
            f"does not tell how; set model.class_names, or model.packed_layout to {' or '.join(_LAYOUTS)}"
        )
    family = next(each for each in FAMILIES if each.marks == {"packed_layout": layout})
    if layout == "M,4+C" and shape[1] not in grid_sizes(known["input_hw"], 1):
        family = _BEST_300
    elif layout == "M,4+C" and shape[1] is None and signature.has_boolean_mask:
        family = _PICKED
    return {**family.fields, **family.marks, "boxes_output": name, "scores_output": name}


def _answered(signature: Signature, known: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
    """What a model answers for black images."""
    spec = signature.inputs[known["input_name"]]
    batch = (spec.shape or (None,))[0] or 1
    return signature.run({known["input_name"]: np.zeros((batch, *known["input_hw"], 3), spec.dtype)})


def layout_of(sizes: tuple[int | None, int | None], input_hw: tuple[int, int], classes: int) -> JoinedLayout:
    """The layout of a combined output, by its shape; empty if several match.

    Args:
      sizes: Of its second and third axis; None if unknown.
      input_hw: Height and width of the model's input, pixels.
      classes: How many classes the model has; 0 if unknown.
    """
    first, last = sizes
    single, triple = grid_sizes(input_hw, 1), grid_sizes(input_hw, 3)
    shapes: tuple[tuple[JoinedLayout, int | None, int | None, int, set[int | None]], ...] = (
        ("4+C,M", last, first, 4, single),
        ("M,4+C", first, last, 4, single),
        ("M,5+C", first, last, 5, single | triple),
    )
    wide = {
        layout: many in numbers
        for layout, many, width, least, numbers in shapes
        if width is not None and (width == least + classes if classes else width > least)
    }
    fitting = [layout for layout, is_grid in wide.items() if is_grid]
    if last == 6 and (first is None or first not in single | triple):
        fitting.append("M,6")
    if not fitting and classes:  # other strides, or only the best few candidates: the width must tell
        fitting = [*wide]
    return fitting[0] if len(fitting) == 1 else ""


def measure(
    signature: Signature, metadata: DetectorMetadata, given: Mapping[str, Any], known: Mapping[str, Any]
) -> DetectorMetadata:
    """The metadata with what only the model's outputs for an image of noise show.

    Args:
      signature: The model's inputs and outputs.
      metadata: What is known of it.
      given: The part that the config says.
      known: The part that its shapes show.

    Raises:
      ValueError: Its outputs are not those of its family, or show no units.
    """
    is_yolo_nas = known.get("letterbox_rule") == "super_gradients" and not {"box_format", "box_units"} & {*given}
    if not is_yolo_nas and not metadata.packed_layout:
        return metadata
    spec = signature.inputs[metadata.input_name]
    noise = np.random.default_rng(0).uniform(*metadata.value_range, (signature.batch_of(metadata) or 1, *metadata.input_hw, 3))
    rows = signature.run({metadata.input_name: noise.astype(spec.dtype)})[metadata.boxes_output]
    if is_yolo_nas:
        boxes = rows.reshape(-1, 4)
        if (boxes[:, 2:] >= boxes[:, :2]).all(axis=1).mean() < _IN_ORDER or np.median(np.abs(boxes)) <= _LARGEST_SHARE:
            raise ValueError(
                f"has one box a cell in '{metadata.boxes_output}', but no corners in pixels as YOLO-NAS has; "
                "set model.box_format, model.box_units, model.resize and model.nms"
            )
        return metadata
    rows = np.swapaxes(rows, 1, 2) if metadata.packed_layout == "4+C,M" else rows
    confidences = rows[..., 4:5] if metadata.packed_layout == "M,6" else rows[..., 4:]
    if not metadata.score_activation and ((confidences < -_ROUNDED) | (confidences > 1 + _ROUNDED)).any():
        raise ValueError(
            f"some numbers behind the boxes in '{metadata.boxes_output}' are no confidences in 0..1: masks, key points and "
            "angles are not supported; if they are logits, set model.score_activation"
        )
    if "box_format" not in given:
        found = {field: value for field, value in _match_yolox(metadata, rows).items() if field not in given}
        if found:
            return dataclasses.replace(metadata, **found)
    return metadata if "box_units" in {**given, **known} else dataclasses.replace(metadata, box_units=_units(rows, metadata))


def _match_yolox(metadata: DetectorMetadata, rows: np.ndarray) -> dict[str, Any]:
    """Fields of YOLOX, by the rows `(N, M, 5 + C)` of a model with one box and an objectness for each cell; empty for others."""
    if metadata.packed_layout != "M,5+C" or rows.shape[1] not in grid_sizes(metadata.input_hw, 1):
        return {}
    cells = grid(metadata.input_hw, rows.shape[1])[0].astype(float)
    follow = min(abs(np.corrcoef(rows[0, :, axis], cells[:, axis])[0, 1]) for axis in (0, 1)) if np.ptp(rows[0, :, :2]) else 0.0
    if follow < _FOLLOWS:
        return {**_YOLOX.fields, **_YOLOX.marks, "box_format": "grid"}
    in_shares, is_yolov6 = np.median(np.abs(rows[0, :, :2])) <= _LARGEST_SHARE, np.allclose(rows[..., 4], 1)
    return {} if in_shares or is_yolov6 else {**_YOLOX.fields, **_YOLOX.marks}


def _units(rows: np.ndarray, metadata: DetectorMetadata) -> BoxUnits:
    """The units of a model's boxes by its rows for noise.

    Candidates without suppression lie all over the input, and a suppressed output has its best few even at low confidences. So
    their median is far above 2 in pixels, and below 2 in shares.
    """
    corners_or_centre = rows[..., : 4 if metadata.packed_layout == "M,6" else 2]
    largest = np.abs(corners_or_centre).max(axis=-1)
    seen = largest[np.isfinite(largest) & (largest > 0)]  # unused rows are zeros
    if not seen.size:
        raise ValueError(
            "it answers no boxes to an image of noise, so their units stay unknown; set model.box_units to norm or pixels"
        )
    return "norm" if np.median(seen) <= _LARGEST_SHARE else "pixels"
