"""Describes a detector's inputs and outputs: by its own metadata or its signature, overridden by the config."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from models.class_names import read_class_names
from models.export import CANDIDATES
from models.metadata import DetectorMetadata, what_is_wrong
from pipeline.config import ModelConfig
from pipeline.detect import families
from pipeline.detect.families import THRESHOLDS, ExportNotes
from pipeline.detect.packed_output import expected_shape
from pipeline.detect.signature import Signature, Tensor
from pipeline.errors import ModelError


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
    signature: Signature, described: DetectorMetadata | None, model: ModelConfig, folder: str, notes: ExportNotes | None = None
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
    known = dataclasses.asdict(described) if described else families.recognise(signature, given, notes or ExportNotes(), folder)
    try:
        metadata = DetectorMetadata(**{**known, **given, "name": name_of_model(model, described, folder)})
    except ValueError as err:
        raise ModelError(f"model {folder}: model.{what_is_wrong(err)}") from err
    _check_inputs(signature, metadata, folder)
    _check_outputs(signature.outputs, metadata, folder)
    return metadata if described else families.measure(signature, metadata, given, known, folder)


def name_of_model(model: ModelConfig, described: DetectorMetadata | None, folder: str) -> str:
    """The config's name for it, else its own, else that of its folder."""
    parts = [part for part in folder.split("/") if part and not part.isdigit()]
    return model.name or (described.name if described else parts[-1].removesuffix(".onnx") if parts else "model")


def _class_names(names: tuple[str, ...], folder: str) -> tuple[str, ...]:
    """The names, or those in the text file that the config names instead."""
    if len(names) != 1 or not (os.path.isfile(names[0]) or names[0].endswith((".txt", ".names"))):
        return names
    try:
        return read_class_names(names[0])
    except (OSError, ValueError) as err:
        raise ModelError(f"model {folder}: class_names {names[0]}: expected a text file with one name a line: {err}") from err


def _check_inputs(signature: Signature, metadata: DetectorMetadata, folder: str) -> None:
    inputs = signature.inputs
    if metadata.input_name not in inputs:
        raise ModelError(
            f"model {folder}: expected an input '{metadata.input_name}', the signature takes {sorted(inputs)}; "
            "set model.input_name or model.signature"
        )
    spec, hw = inputs[metadata.input_name], metadata.input_hw
    if metadata.resize == "none" and spec.shape and spec.rank == 4 and spec.shape[1:3] != (None, None):
        raise ModelError(f"model {folder}: model.resize is none, but it takes images {spec.shape} only; set model.resize")
    fits = spec.rank == 4 and spec.fits((None, *metadata.graph_hw, 3))
    if not fits or spec.dtype != metadata.input_dtype:
        shape = "of any shape" if spec.shape is None else spec.shape
        raise ModelError(
            f"model {folder}: expected images {metadata.input_dtype} (N, {hw[0]}, {hw[1]}, 3) as input '{metadata.input_name}', "
            f"the signature takes {spec.dtype} {shape}; set model.input_hw, model.input_dtype or model.signature"
        )
    wanted = {metadata.input_name, *(THRESHOLDS if metadata.threshold_inputs else ())}
    required = {name for name, spec in inputs.items() if not spec.is_optional}
    if not required <= wanted <= set(inputs):
        raise ModelError(
            f"model {folder}: expected a signature of the inputs {sorted(wanted)}, it takes {sorted(inputs)}; set model.signature"
        )


def _check_outputs(outputs: Mapping[str, Tensor], metadata: DetectorMetadata, folder: str) -> None:
    wanted = [metadata.boxes_output, metadata.scores_output, metadata.classes_output, metadata.count_output]
    missing = [output for output in wanted if output and output not in outputs]
    if missing:
        raise ModelError(
            f"model {folder}: expected outputs {missing}, the signature gives {sorted(outputs)}; "
            "set model.boxes_output and its siblings"
        )
    if metadata.packed_layout:
        _check_joined(outputs[metadata.boxes_output], metadata, folder)
    else:
        _check_apart(outputs[metadata.boxes_output], outputs[metadata.scores_output], metadata, folder)


def _check_joined(joined: Tensor, metadata: DetectorMetadata, folder: str) -> None:
    wanted = expected_shape(metadata)
    if not joined.fits(wanted):
        got = "of any shape" if joined.shape is None else joined.shape
        raise ModelError(
            f"model {folder}: expected output '{metadata.boxes_output}' of shape {wanted}, by layout {metadata.packed_layout} "
            f"and {len(metadata.class_names) or 'any number of'} classes; got {got}; set model.packed_layout or model.class_names"
        )


def _check_apart(boxes: Tensor, scores: Tensor, metadata: DetectorMetadata, folder: str) -> None:
    if not boxes.fits((None, None, 4)):
        raise ModelError(
            f"model {folder}: expected boxes (N, M, 4) as output '{metadata.boxes_output}', it is {boxes.shape}; "
            "set model.boxes_output"
        )
    if scores.rank not in (None, 2, 3) or (scores.rank == 3 and metadata.classes_output):
        raise ModelError(
            f"model {folder}: expected scores (N, M) as output '{metadata.scores_output}', or (N, M, classes) without a "
            f"model.classes_output; it is {scores.shape}; set model.scores_output"
        )
