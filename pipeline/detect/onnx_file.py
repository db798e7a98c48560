"""What all engines for ONNX files share: which file it is, and how it is described.

A model is one file, or a folder with `model.onnx` and perhaps `assets.extra/detector.json`, as `detect-objects import` writes it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import yaml

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.describe_model import describe, own_metadata
from pipeline.detect.families import ExportNotes, notes_from
from pipeline.detect.signature import Signature
from pipeline.detect.versions import ONNX_MODEL, first_line

_NOTED = ("names", "imgsz", "task")  # properties that Ultralytics writes


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
