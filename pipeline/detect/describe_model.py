"""Describes a detector's inputs and outputs: by its own metadata or its signature, overridden by the config.

An ONNX model is one file, or a folder with `model.onnx` and perhaps a description, as `detect-objects import` writes it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from models.class_names import read_class_names
from models.metadata import METADATA_PATH, DetectorMetadata, read_metadata, what_is_wrong
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.families import THRESHOLDS, ExportNotes, measure, notes_from, recognise
from pipeline.detect.model_arrays import Signature
from pipeline.detect.versions import ONNX_MODEL, first_line
from pipeline.errors import ModelError

_NOTED = ("names", "imgsz", "task")  # properties that Ultralytics writes into an ONNX file


def own_metadata(local: str, folder: str) -> DetectorMetadata | None:
    """A model's own metadata; None if it has none.

    Args:
      local: Its files on this machine.
      folder: Its name in messages.

    Raises:
      ModelError: They cannot be understood.
    """
    try:
        return read_metadata(local)
    except ValueError as err:
        raise ModelError(f"model {folder}: {METADATA_PATH} cannot be understood: {first_line(err)}") from err


def describe(
    signature: Signature,
    described: DetectorMetadata | None,
    model: ModelConfig,
    folder: str,
    detect: DetectConfig,
    *,
    read_notes: Callable[[], ExportNotes] = ExportNotes,
) -> DetectorMetadata:
    """A detector's metadata, checked against its signature and the settings.

    Args:
      signature: The model's signature to call.
      described: The model's own metadata.
      model: The config, which overrides the rest.
      folder: The model, for messages and as its name.
      detect: How to run it.
      read_notes: Reads the notes of a YOLO export, of a model that does not describe itself; raises ValueError.

    Raises:
      ModelError: The signature is not a detector's, or does not match the metadata or the settings.
    """
    fields = [field.name for field in dataclasses.fields(DetectorMetadata)]
    given = {field: value for field in fields if (value := getattr(model, field, None)) is not None}
    try:
        if given.get("class_names"):
            given["class_names"] = _class_names(given["class_names"])
        known = dataclasses.asdict(described) if described else recognise(signature, given, read_notes())
        metadata = _metadata_of({**known, **given, "name": name_of_model(model, described, folder)})
        _check_inputs(signature, metadata)
        _check_outputs(signature, metadata)
        if detect.labels_per_box == "several" and (metadata.classes_output or metadata.packed_layout == "M,6"):
            raise ValueError("has one class for each box only, and labels_per_box is several; leave out --labels-per-box")
        return metadata if described else measure(signature, metadata, given, known)
    except ValueError as err:
        raise ModelError(f"model {folder}: {err}") from err


def onnx_file(local: str) -> str | None:
    """The ONNX file of a model's files on this machine; None if it is another kind of model."""
    path = local if local.endswith(".onnx") else os.path.join(local, ONNX_MODEL)
    return path if os.path.isfile(path) else None


def describe_onnx(
    signature: Signature, local: str, folder: str, model: ModelConfig, detect: DetectConfig, *, properties: Mapping[str, str]
) -> DetectorMetadata:
    """A model's metadata: its own, or as recognised, overridden by the config; see `describe`.

    Args:
      signature: The model's inputs and outputs.
      local: Its files on this machine.
      folder: Where they are from.
      model: The config.
      detect: How to run it.
      properties: The file's `metadata_props`.

    Raises:
      ModelError: It is no detector that is recognised.
    """

    def read_notes() -> ExportNotes:
        try:
            return notes_from({name: yaml.safe_load(properties[name]) for name in _NOTED if name in properties}, "its properties")
        except yaml.YAMLError as err:
            raise ValueError(f"its properties cannot be understood: {first_line(err)}") from err

    described = None if local.endswith(".onnx") else own_metadata(local, folder)
    return describe(signature, described, model, folder, detect, read_notes=read_notes)


def _metadata_of(fields: dict[str, Any]) -> DetectorMetadata:
    try:
        return DetectorMetadata(**fields)
    except ValueError as err:
        raise ValueError(f"model.{what_is_wrong(err)}") from err


def name_of_model(model: ModelConfig, described: DetectorMetadata | None, folder: str) -> str:
    """The config's name for it, else its own, else that of its folder."""
    parts = [part for part in folder.split("/") if part and not part.isdigit()]
    return model.name or (described.name if described else parts[-1].removesuffix(".onnx") if parts else "model")


def _class_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, or those in the text file that the config names instead."""
    if len(names) != 1 or not (os.path.isfile(names[0]) or names[0].endswith((".txt", ".names"))):
        return names
    try:
        return read_class_names(names[0])
    except (OSError, ValueError) as err:
        raise ValueError(f"class_names {names[0]}: expected a text file with one name a line: {err}") from err


def _check_inputs(signature: Signature, metadata: DetectorMetadata) -> None:
    inputs, name, hw = signature.inputs, metadata.input_name, metadata.input_hw
    wanted = {name, *(THRESHOLDS if metadata.threshold_inputs else ())}
    required = {each for each, spec in inputs.items() if not spec.is_optional}
    if name not in inputs:
        raise ValueError(f"expected an input '{name}', the signature takes {sorted(inputs)}; set model.signature")
    spec = inputs[name]
    if metadata.resize == "none" and spec.shape and spec.rank == 4 and spec.shape[1:3] != (None, None):
        raise ValueError(f"model.resize is none, but it takes images {spec.shape} only; set model.resize")
    dtype = "float32" if spec.dtype == "float16" else spec.dtype  # the engines cast
    if spec.rank != 4 or not spec.fits((None, *metadata.graph_hw, 3)) or dtype != metadata.input_dtype:
        raise ValueError(
            f"expected images {metadata.input_dtype} (N, {hw[0]}, {hw[1]}, 3) as input '{name}', the signature takes "
            f"{spec.dtype} {spec.shape or 'of any shape'}; set model.input_hw or model.signature"
        )
    if not required <= wanted <= set(inputs):
        raise ValueError(f"expected a signature of the inputs {sorted(wanted)}, it takes {sorted(inputs)}; set model.signature")


def _check_outputs(signature: Signature, metadata: DetectorMetadata) -> None:
    outputs = signature.outputs
    wanted = [metadata.boxes_output, metadata.scores_output, metadata.classes_output, metadata.count_output]
    if missing := [output for output in wanted if output and output not in outputs]:
        raise ValueError(
            f"expected outputs {missing}, the signature gives {sorted(outputs)}; set model.boxes_output and its siblings"
        )
    boxes, scores, classes = outputs[metadata.boxes_output], outputs[metadata.scores_output], len(metadata.class_names)
    if metadata.packed_layout:
        axes = {"4+C": 4 + classes if classes else None, "5+C": 5 + classes if classes else None, "6": 6}
        shape = None, *(axes.get(axis) for axis in metadata.packed_layout.split(","))
        if not boxes.fits(shape):
            raise ValueError(
                f"expected output '{metadata.boxes_output}' of shape {shape}, by layout {metadata.packed_layout} and "
                f"{classes or 'any number of'} classes; got {boxes.shape}; set model.packed_layout or model.class_names"
            )
    elif not boxes.fits((None, None, 4)):
        raise ValueError(
            f"expected boxes (N, M, 4) as output '{metadata.boxes_output}', it is {boxes.shape}; set model.boxes_output"
        )
    elif scores.rank not in (None, 2, 3) or (scores.rank == 3 and metadata.classes_output):
        raise ValueError(
            f"expected scores (N, M) as output '{metadata.scores_output}', or (N, M, classes) without a model.classes_output; "
            f"it is {scores.shape}; set model.scores_output"
        )
