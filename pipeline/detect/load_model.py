"""Loads a model version for the engine of the settings. For OpenVINO another process converts it, once for each user."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import importlib.metadata
import os
import tempfile
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from models.digits.cache import cache_folder
from models.metadata import metadata_from_json, metadata_to_json
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import remote_model, saved_model
from pipeline.detect.golden import read_golden
from pipeline.detect.load_in_subprocess import Preparation
from pipeline.detect.loaded_model import LoadedModel
from pipeline.detect.openvino_graph import OpenVinoGraph, check_installed
from pipeline.detect.openvino_int8 import INT8
from pipeline.detect.prepared_model import PreparedModel, start
from pipeline.detect.remote_server import check_engine
from pipeline.detect.server_protocols import PROTOCOLS
from pipeline.detect.versions import files_of, first_line, lacking, locate
from pipeline.errors import ModelError

_OF_CONVERSION = ("score_threshold", "iou_threshold", "max_detections", "classes")  # settings that a graph may contain
_PARTS = ("xml", "weights", "batch", "metadata")  # of a converted model; its warm-up requests follow


def load(model: ModelConfig, detect: DetectConfig) -> LoadedModel:
    """Loads a detector for its engine, and warms it.

    Raises:
      ModelError: The model is missing, damaged or being written, has no matching signature, or fails on a blank image; or the
        engine is not installed, or does not fit the model's path.
    """
    check_engine(model, detect.engine)
    if detect.precision == "int8" and detect.engine != "openvino":
        raise ModelError(f"precision int8: expected --engine openvino, got {detect.engine}")
    if detect.engine == "openvino":
        return start(converted_model(model, detect), detect)
    return remote_model.load(model, detect) if detect.engine in PROTOCOLS else saved_model.load(model, detect)


def converted_model(model: ModelConfig, detect: DetectConfig) -> PreparedModel:
    """A detector for OpenVINO: from the user's cache, else converted by another process and stored there.

    Raises:
      ModelError: As `load`.
    """
    check_installed()
    folder, version = locate(model.path, model.model_version)
    if missing := lacking(files_of(folder)):
        raise ModelError(f"model {folder}: lacks {missing}; copy it whole, then start again")
    settings = folder, version, model, [getattr(detect, name) for name in _OF_CONVERSION], importlib.metadata.version("openvino")
    with saved_model.local_copy(folder) as local:
        if detect.precision == "int8":
            return _int8_version(model, folder, version, local)
        digest = _digest(local, settings)
        cached = os.path.join(cache_folder(), "openvino", f"{digest}.npz")
        try:
            return _read(cached, folder, version, local)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):  # none yet, or damaged
            prepared = Preparation(folder, version, model, detect, gpu=False).result()
        if "://" not in folder and digest != _digest(local, settings):
            raise ModelError(f"model {folder}: its files changed while it was loaded; start again once it is copied")
    with contextlib.suppress(OSError):  # a full disk, or a cache that cannot be written: the next start converts again
        write_converted(cached, prepared)
    return prepared


def _int8_version(model: ModelConfig, folder: str, version: str, local: str) -> PreparedModel:
    """The int8 network that `detect-objects quantize` wrote into a version."""
    try:
        prepared = _read(os.path.join(local, INT8), folder, version, local)
    except FileNotFoundError as err:
        raise ModelError(f"model {folder}: has no int8 network ({INT8}); make a version: detect-objects quantize") from err
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as err:
        raise ModelError(f"model {folder}: {INT8} cannot be read: {first_line(err)}") from err
    name = model.name or prepared.metadata.name
    return dataclasses.replace(prepared, metadata=dataclasses.replace(prepared.metadata, name=name))


def _digest(local: str, settings: Sequence[Any]) -> str:
    """Of all files of a model, and of all that its conversion depends on."""
    found = hashlib.sha256(repr(settings).encode())
    class_names = settings[2].class_names or ()
    for path in [*sorted(glob.glob(os.path.join(glob.escape(local), "**"), recursive=True)), *class_names]:
        if os.path.isfile(path):
            found.update(path.encode() if path in class_names else os.path.relpath(path, local).encode())
            with open(path, "rb") as file:
                while part := file.read(1 << 20):
                    found.update(part)
    return found.hexdigest()[:32]


def _read(cached: str, folder: str, version: str, local: str) -> PreparedModel:
    with np.load(cached, allow_pickle=False) as parts:
        graph = OpenVinoGraph(parts["xml"], parts["weights"], int(parts["batch"]))
        requests = [parts[name] for name in parts.files if name not in _PARTS]
        metadata = metadata_from_json(str(parts["metadata"]))
    warmup = tuple(request.tobytes() if request.ndim == 1 else request for request in requests)
    return PreparedModel(folder, version, metadata, graph, warmup, read_golden(local))


def write_converted(cached: str, prepared: PreparedModel) -> None:
    """Writes a converted model, whole or not at all."""
    graph = prepared.optimised
    assert isinstance(graph, OpenVinoGraph)  # noqa: S101  for mypy
    values: list[Any] = [graph.xml, graph.weights, graph.batch, metadata_to_json(prepared.metadata)]
    requests = [np.frombuffer(one, np.uint8) if isinstance(one, bytes) else one for one in prepared.warmup_requests]
    os.makedirs(os.path.dirname(cached), exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=os.path.dirname(cached)) as unfinished:
        whole = os.path.join(unfinished, "model.npz")
        np.savez(whole, *requests, **dict(zip(_PARTS, values, strict=True)))
        os.replace(whole, cached)
