"""Describes a detector's inputs and outputs: by its own metadata or its signature, overridden by the config."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from models.class_names import read_class_names
from models.export import CANDIDATES
from models.metadata import DetectorMetadata
from pipeline.config import ModelConfig
from pipeline.detect import families, packed_output
from pipeline.detect.packed_output import ExportNotes
from pipeline.errors import ModelError

_THRESHOLDS = ("score_threshold", "iou_threshold", "max_detections")
_DEFAULT_HW = (640, 640)  # of foreign models that take images of any size
_OBJECT_DETECTION_API = {  # https://github.com/tensorflow/models/blob/master/research/object_detection/exporter_lib_v2.py
    "boxes_output": "detection_boxes",
    "scores_output": "detection_scores",
    "classes_output": "detection_classes",
    "count_output": "num_detections",
    "box_format": "yxyx",
    "class_id_offset": 1,
    "threshold_inputs": False,
}


def pick_signature(signatures: Mapping[str, Any], described: DetectorMetadata | None, model: ModelConfig, folder: str) -> Any:
    """The signature to call: the config's, else the model's own choice, else TensorFlow's default name.

    Raises:
      ModelError: The model has no signature of that name.
    """
    name = model.signature or (described.signature if described else "serving_default")
    if name == CANDIDATES and name not in signatures:
        raise ModelError(f"model {folder}: labels_per_box several needs a model of this release; import or export it again")
    if name not in signatures:
        raise ModelError(f"model {folder}: expected a signature '{name}', it has {sorted(signatures)}; set model.signature")
    return signatures[name]


def for_several_labels(described: DetectorMetadata) -> DetectorMetadata:
    """The description of a model that this project exported, by its signature without suppression."""
    apart: dict[str, Any] = {
        "signature": CANDIDATES,
        "classes_output": "",
        "count_output": "",
        "nms": "pipeline",
        "threshold_inputs": False,
    }
    return dataclasses.replace(described, **apart)


def check_several_labels(metadata: DetectorMetadata, folder: str) -> None:
    """Checks that a model has scores of every class.

    Raises:
      ModelError: It has the best class of each box only.
    """
    if metadata.classes_output or metadata.packed_layout == "M,6":
        raise ModelError(
            f"model {folder}: has one class for each box only, and labels_per_box is several; leave out --labels-per-box"
        )


def describe(
    signature: Any, described: DetectorMetadata | None, model: ModelConfig, folder: str, notes: ExportNotes | None = None
) -> DetectorMetadata:
    """A detector's metadata, checked against its signature.

    Args:
      signature: The SavedModel's signature to call.
      described: The model's own metadata.
      model: The config, which overrides the rest.
      folder: The SavedModel, for messages and as the model's name.
      notes: Metadata of a YOLO export.

    Raises:
      ModelError: The signature is not a detector's, or does not match the metadata.
    """
    fields = [field.name for field in dataclasses.fields(DetectorMetadata)]
    given = {field: value for field in fields if (value := getattr(model, field, None)) is not None}
    if given.get("class_names"):
        given["class_names"] = _class_names(given["class_names"], folder)
    known = dataclasses.asdict(described) if described else _guess(signature, given, notes or ExportNotes(), folder)
    try:
        metadata = DetectorMetadata(**{**known, **given, "name": name_of_model(model, described, folder)})
    except ValueError as err:
        raise ModelError(f"model {folder}: model.{err}") from err
    _check_inputs(signature, metadata, folder)
    _check_outputs(signature.structured_outputs, metadata, folder)
    return metadata if described else _measured(signature, metadata, given, known, folder)


def _measured(
    signature: Any, metadata: DetectorMetadata, given: Mapping[str, Any], known: Mapping[str, Any], folder: str
) -> DetectorMetadata:
    """The metadata with what only the model's answer to an image of noise shows."""
    if known.get("letterbox_rule") == "super_gradients" and not {"box_format", "box_units"} & {*given}:
        families.check_two_outputs(signature, metadata, folder)
    if not metadata.packed_layout:
        return metadata
    rows = packed_output.joined_rows(signature, metadata)
    if packed_output.has_other_numbers(rows, metadata):
        raise ModelError(
            f"model {folder}: some numbers behind the boxes in '{metadata.boxes_output}' are no confidences in 0..1: masks, key "
            "points and angles are not supported; if they are logits, set model.score_activation"
        )
    if "box_format" not in given:
        measured = families.of_one_box_a_cell(metadata, rows, given)
        if measured != metadata:
            return measured
    if "box_units" not in {**given, **known}:
        units = packed_output.measured_units(rows, metadata)
        if units is None:
            raise ModelError(
                f"model {folder}: it answers no boxes to an image of noise, so their units stay unknown; "
                "set model.box_units to norm or pixels"
            )
        return dataclasses.replace(metadata, box_units=units)
    return metadata


def name_of_model(model: ModelConfig, described: DetectorMetadata | None, folder: str) -> str:
    """The config's name for it, else its own, else that of its folder."""
    parts = [part for part in folder.split("/") if part and not part.isdigit()]
    return model.name or (described.name if described else parts[-1] if parts else "model")


def _class_names(names: tuple[str, ...], folder: str) -> tuple[str, ...]:
    """The names, or those in the text file that the config names instead."""
    if len(names) != 1 or not (os.path.isfile(names[0]) or names[0].endswith((".txt", ".names"))):
        return names
    try:
        return read_class_names(names[0])
    except (OSError, ValueError) as err:
        raise ModelError(f"model {folder}: class_names {names[0]}: expected a text file with one name a line: {err}") from err


def _guess(signature: Any, given: Mapping[str, Any], notes: ExportNotes, folder: str) -> dict[str, Any]:
    """Guesses a foreign model's metadata: recognises the TF Object Detection API's outputs, and YOLO's joined output."""
    inputs, outputs = signature.structured_input_signature[1], signature.structured_outputs
    name, spec = next(((name, spec) for name, spec in inputs.items() if spec.shape.rank == 4), ("images", None))
    hw = tuple(spec.shape[1:3]) if spec is not None else (None, None)
    dtype = "float32" if spec is not None and spec.dtype.name == "float32" else "uint8"
    guess: dict[str, Any] = {
        "input_hw": hw if None not in hw else notes.input_hw or _DEFAULT_HW,
        "resize": "none"
        if spec is not None and hw == (None, None) and not (notes.input_hw or given.get("input_hw"))
        else "stretch",
        "class_names": notes.class_names,
        "signature": "serving_default",
        "input_name": name,
        "input_dtype": dtype,
        "value_range": (0.0, 255.0) if dtype == "uint8" else (0.0, 1.0),
        "classes_output": "classes" if "classes" in outputs else "",
        "count_output": "num_detections" if "num_detections" in outputs else "",
        "nms": "model",
        "threshold_inputs": inputs.keys() >= {*_THRESHOLDS},  # as this project exports them
    }
    if _OBJECT_DETECTION_API["boxes_output"] in outputs:
        guess.update(_OBJECT_DETECTION_API, value_range=(0.0, 255.0))
    elif packed_output.has_masks(outputs):
        raise ModelError(
            f"model {folder}: expected a model that detects, its outputs are those of one that segments: boxes and masks"
        )
    elif detr := families.queries(outputs, given, len(given.get("class_names", notes.class_names)), folder):
        if guess["resize"] == "none" and "resize" not in given:
            raise ModelError(f"model {folder}: takes images of any size, which DETR makes smaller before; set model.input_hw")
        guess.update(detr)
    elif two := families.two_outputs(outputs, given.get("input_hw", guess["input_hw"])):
        guess.update(two)
    elif packed_output.is_packed(outputs, given):
        guess.update(_guess_joined(signature, {**guess, **given}, folder))
    return guess


def _guess_joined(signature: Any, known: Mapping[str, Any], folder: str) -> dict[str, Any]:
    outputs = signature.structured_outputs
    name = known.get("boxes_output") or next(iter(outputs))
    if name not in outputs:
        return {}  # a later check reports it
    shape = tuple(outputs[name].shape) if outputs[name].shape.rank is not None else (None, None, None)
    layout = known.get("packed_layout") or packed_output.layout_of(shape[1:], known["input_hw"], len(known["class_names"]))
    if not layout:
        raise ModelError(
            f"model {folder}: the one output '{name}' {shape} has all that is said of M boxes and C classes, but its shape alone "
            f"does not tell how; set model.class_names, or model.packed_layout to {' or '.join(packed_output.LAYOUTS)}"
        )
    best = shape[1] not in packed_output.grid_sizes(known["input_hw"], 1)
    return packed_output.guess(name, layout, picked=shape[1] is None and packed_output.picks_rows(signature), best=best)


def _check_inputs(signature: Any, metadata: DetectorMetadata, folder: str) -> None:
    inputs = signature.structured_input_signature[1]
    if metadata.input_name not in inputs:
        raise ModelError(
            f"model {folder}: expected an input '{metadata.input_name}', the signature takes {sorted(inputs)}; "
            "set model.input_name or model.signature"
        )
    spec, hw = inputs[metadata.input_name], metadata.input_hw
    if metadata.resize == "none" and spec.shape.rank == 4 and tuple(spec.shape[1:3]) != (None, None):
        raise ModelError(f"model {folder}: model.resize is none, but it takes images {tuple(spec.shape)} only; set model.resize")
    fits = spec.shape.rank == 4 and spec.shape[1:].is_compatible_with((*metadata.graph_hw, 3))
    if not fits or spec.dtype.name != metadata.input_dtype:
        shape = tuple(spec.shape) if spec.shape.rank is not None else "of any shape"
        raise ModelError(
            f"model {folder}: expected images {metadata.input_dtype} (N, {hw[0]}, {hw[1]}, 3) as input '{metadata.input_name}', "
            f"the signature takes {spec.dtype.name} {shape}; set model.input_hw, model.input_dtype or model.signature"
        )
    wanted = {metadata.input_name, *(_THRESHOLDS if metadata.threshold_inputs else ())}
    required = {name for name in inputs if not signature.function_type.parameters[name].optional}
    if not required <= wanted <= set(inputs):
        raise ModelError(
            f"model {folder}: expected a signature of the inputs {sorted(wanted)}, it takes {sorted(inputs)}; set model.signature"
        )


def _check_outputs(outputs: Mapping[str, Any], metadata: DetectorMetadata, folder: str) -> None:
    wanted = [metadata.boxes_output, metadata.scores_output, metadata.classes_output, metadata.count_output]
    missing = [output for output in wanted if output and output not in outputs]
    if missing:
        raise ModelError(
            f"model {folder}: expected outputs {missing}, the signature gives {sorted(outputs)}; "
            "set model.boxes_output and its siblings"
        )
    if metadata.packed_layout:
        _check_joined(outputs[metadata.boxes_output].shape, metadata, folder)
    else:
        _check_apart(outputs[metadata.boxes_output].shape, outputs[metadata.scores_output].shape, metadata, folder)


def _check_joined(shape: Any, metadata: DetectorMetadata, folder: str) -> None:
    wanted = packed_output.expected_shape(metadata)
    if not shape.is_compatible_with(wanted):
        got = tuple(shape) if shape.rank is not None else "of any shape"
        raise ModelError(
            f"model {folder}: expected output '{metadata.boxes_output}' of shape {wanted}, by layout {metadata.packed_layout} "
            f"and {len(metadata.class_names) or 'any number of'} classes; got {got}; set model.packed_layout or model.class_names"
        )


def _check_apart(boxes: Any, scores: Any, metadata: DetectorMetadata, folder: str) -> None:
    if not boxes.is_compatible_with((None, None, 4)):
        raise ModelError(
            f"model {folder}: expected boxes (N, M, 4) as output '{metadata.boxes_output}', it is {tuple(boxes)}; "
            "set model.boxes_output"
        )
    if scores.rank not in (None, 2, 3) or (scores.rank == 3 and metadata.classes_output):
        raise ModelError(
            f"model {folder}: expected scores (N, M) as output '{metadata.scores_output}', or (N, M, classes) without a "
            f"model.classes_output; it is {tuple(scores)}; set model.scores_output"
        )
