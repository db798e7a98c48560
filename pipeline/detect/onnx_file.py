"""What all engines for ONNX files share: which file it is, what it says about itself, and how it is described.

A model is one file, or a folder with `model.onnx` and perhaps `assets.extra/detector.json`, as `detect-objects import` writes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from models.metadata import METADATA_PATH, DetectorMetadata, read_metadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.describe_model import check_several_labels, describe
from pipeline.detect.families import ExportNotes, notes_from
from pipeline.detect.signature import Signature
from pipeline.detect.versions import ONNX_MODEL, first_line
from pipeline.errors import ModelError

_METADATA_PROPS, _KEY, _VALUE = 14, 1, 2  # fields of ModelProto and StringStringEntryProto in onnx.proto
_LENGTHS = {1: 8, 5: 4}  # bytes of protobuf's fixed wire types


def onnx_file(local: str) -> str | None:
    """The ONNX file of a model's files on this machine; None if it is another kind of model."""
    path = local if local.endswith(".onnx") else os.path.join(local, ONNX_MODEL)
    return path if os.path.isfile(path) else None


def describe_onnx(signature: Signature, local: str, folder: str, model: ModelConfig, detect: DetectConfig) -> DetectorMetadata:
    """A model's metadata: its own, or as recognised, overridden by the config; see `describe`.

    Raises:
      ModelError: It is no detector that is recognised.
    """
    file = onnx_file(local) or ""
    try:
        described = None if file == local else read_metadata(local)
        notes = ExportNotes() if described else notes_from(_properties(file), folder, "its properties")
    except (OSError, ValueError, IndexError, yaml.YAMLError) as err:
        raise ModelError(f"model {folder}: {METADATA_PATH} or the file cannot be understood: {first_line(err)}") from err
    metadata = describe(signature, described, model, folder, notes)
    if detect.labels_per_box == "several":
        check_several_labels(metadata, folder)
    return metadata


def _properties(file: str) -> Mapping[str, object]:
    """The `metadata_props` of an ONNX file, such as Ultralytics writes: `names`, `imgsz`, `task`."""
    content = memoryview(Path(file).read_bytes())
    entries = [dict(_fields(value)) for number, value in _fields(content) if number == _METADATA_PROPS]
    return {bytes(one[_KEY]).decode(): yaml.safe_load(bytes(one.get(_VALUE, b"")).decode()) for one in entries if _KEY in one}


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The fields of a protobuf message that have bytes, by their numbers: https://protobuf.dev/programming-guides/encoding."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        number, wire_type = divmod(varint(), 8)
        if wire_type == 0:
            varint()
            continue
        length = varint() if wire_type == 2 else _LENGTHS[wire_type]
        if wire_type == 2:
            yield number, message[at : at + length]
        at += length
