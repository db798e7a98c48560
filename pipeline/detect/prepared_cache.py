"""Cache of prepared models in the user's cache folder: a later start reads the graph instead of loading and optimising the model.

    <cache>/hybrid-detection-pipeline/models/<digest>.npz

The digest covers the model's files and all that the graph depends on: settings, TensorFlow, OpenVINO, this program, and the
processor. An entry is arrays and JSON, no pickle. A damaged entry counts as absent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import hashlib
import importlib.metadata
import json
import os
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from models.metadata import metadata_from_json, metadata_to_json
from models.user_cache import cache_folder
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.golden import read_golden
from pipeline.detect.openvino_graph import OpenVinoGraph
from pipeline.detect.openvino_int8 import INT8
from pipeline.detect.prepared_model import OptimisedGraph, PreparedModel
from pipeline.errors import ModelError

_KEPT_BYTES = 2_000_000_000  # of all entries; the ones that were not read for longest go first
_OF_GRAPH = ("engine", "precision", "xla", "classes", "max_detections", "score_threshold", "iou_threshold", "labels_per_box")
_PROGRAMS = ("tensorflow", "tensorflow-cpu", "openvino")
_SWITCHES = ("TF_", "XLA_", "ONEDNN_", "DNNL_", "OPENVINO_")  # environment variables that change a graph
_HERE = os.path.dirname(os.path.abspath(__file__))
_OWN_FOLDERS = (_HERE, os.path.dirname(os.path.dirname(_HERE)) + "/models")


def settings_of_graph(detect: DetectConfig) -> DetectConfig:
    """The settings that a graph may depend on; all others have their defaults."""
    return dataclasses.replace(DetectConfig(), **{name: getattr(detect, name) for name in _OF_GRAPH})


def entry_of(local: str, folder: str, version: str, model: ModelConfig, detect: DetectConfig, *, gpu: bool) -> str:
    """The file of the cache for a model.

    Args:
      local: The model's files on this machine.
      folder: Where they are from.
      version: The model's version.
      model: Its description in the config.
      detect: The settings of the graph.
      gpu: Whether on a GPU.
    """
    found = hashlib.sha256(repr((folder, version, model, settings_of_graph(detect), gpu, _surroundings())).encode())
    class_names = [name for name in model.class_names or () if os.path.isfile(name)]
    for path in [*_files_in(local), *class_names]:
        found.update(os.path.relpath(path, local).encode("utf-8", "surrogateescape"))
        found.update(_digest_of(path))
    return os.path.join(cache_folder(), "models", f"{found.hexdigest()[:32]}.npz")


def read_prepared(
    entry: str, local: str, folder: str, version: str, *, model: ModelConfig, detect: DetectConfig
) -> PreparedModel | None:
    """What a version runs as: its int8 network for that precision, else its entry of the cache; None if it is to be prepared.

    The start, a swap and a canary all ask here, so that none runs a version as something else.

    Args:
      entry: Its file of the cache.
      local: Its files on this machine.
      folder: Where they are from.
      version: Its version.
      model: Its description in the config.
      detect: How to run it.

    Raises:
      ModelError: It has no int8 network that can be read.
    """
    if detect.precision != "int8":
        with contextlib.suppress(OSError):
            os.utime(entry)  # the newest entries are kept
        return read_entry(entry, folder, version, local)
    prepared = read_entry(os.path.join(local, INT8), folder, version, local)
    if not (prepared and isinstance(prepared.optimised, OpenVinoGraph)):
        raise ModelError(
            f"model {folder}: has no int8 network that can be read ({INT8}); make a version: detect-objects quantize"
        )
    name = model.name or prepared.metadata.name
    return dataclasses.replace(prepared, metadata=dataclasses.replace(prepared.metadata, name=name))


def read_entry(path: str, folder: str, version: str, local: str) -> PreparedModel | None:
    """A prepared model; None if there is none.

    Args:
      path: The file.
      folder: The model, for messages.
      version: The model's version.
      local: The model's files on this machine, for its golden images.
    """
    try:
        with np.load(path, allow_pickle=False) as parts:
            metadata = metadata_from_json(str(parts["metadata"]))
            optimised = _openvino_graph(parts) if "xml" in parts else _tensorflow_graph(parts)
            requests = [parts[name] for name in parts.files if name.startswith("arr_")]
            golden = read_golden(local)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile):
        return None
    warmup = tuple(request.tobytes() if request.ndim == 1 else request for request in requests)
    return PreparedModel(folder, version, metadata, optimised, warmup, golden)


def write_entry(path: str, prepared: PreparedModel) -> None:
    """Writes a prepared model, whole or not at all.

    Raises:
      OSError: The file cannot be written.
    """
    graph = prepared.optimised
    parts = _parts_of_openvino(graph) if isinstance(graph, OpenVinoGraph) else _parts_of_tensorflow(graph)
    requests = [np.frombuffer(one, np.uint8) if isinstance(one, bytes) else one for one in prepared.warmup_requests]
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as unfinished:
        whole = os.path.join(unfinished, "model.npz")
        np.savez(whole, *requests, metadata=metadata_to_json(prepared.metadata), **parts)
        os.replace(whole, path)


def keep_in_cache(path: str, prepared: PreparedModel, most_bytes: int = _KEPT_BYTES) -> None:
    """Writes an entry, then removes the oldest ones beyond `most_bytes`; does nothing where the cache cannot be written."""
    with contextlib.suppress(OSError):  # a full disk, or a folder of somebody else: the next start prepares the model again
        write_entry(path, prepared)
        _remove_oldest(os.path.dirname(path), most_bytes)


def _remove_oldest(folder: str, room: int) -> None:
    entries = [(entry.stat(), entry.path) for entry in os.scandir(folder) if entry.name.endswith(".npz")]
    for status, path in sorted(entries, key=lambda entry: -entry[0].st_mtime_ns):
        room -= status.st_size
        if room < 0:
            os.remove(path)


def _parts_of_openvino(graph: OpenVinoGraph) -> dict[str, Any]:
    return {"xml": graph.xml, "weights": graph.weights, "batch": graph.batch}


def _openvino_graph(parts: Mapping[str, np.ndarray]) -> OpenVinoGraph:
    return OpenVinoGraph(parts["xml"], parts["weights"], int(parts["batch"]))


def _parts_of_tensorflow(graph: OptimisedGraph) -> dict[str, Any]:
    weights = {name: weight.dtype.name for name, weight in graph.weights.items()}
    facts = {"fed": graph.fed, "fetched": graph.fetched, "batch": graph.batch, "fused": graph.fused, "weights": weights}
    stored = {f"weight{n}": _storable(weight) for n, weight in enumerate(graph.weights.values())}
    return {"graph": np.frombuffer(graph.graph.SerializeToString(), np.uint8), "facts": json.dumps(facts), **stored}


def _tensorflow_graph(parts: Mapping[str, np.ndarray]) -> OptimisedGraph:
    from google.protobuf.message import DecodeError
    from tensorflow.core.framework import graph_pb2

    facts = json.loads(str(parts["facts"]))
    types = facts.pop("weights")
    weights = {name: parts[f"weight{n}"].view(_dtype(dtype)) for n, (name, dtype) in enumerate(types.items())}
    try:
        return OptimisedGraph(graph_pb2.GraphDef.FromString(parts["graph"].tobytes()), weights, **facts)
    except DecodeError as err:
        raise ValueError(f"the graph cannot be read: {err}") from err


def _storable(weight: np.ndarray) -> np.ndarray:
    """The same bytes as a type that NumPy's format knows, which bfloat16 is not."""
    return weight.view(np.uint16) if weight.dtype.name == "bfloat16" else weight


def _dtype(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return ml_dtypes.bfloat16


@functools.cache
def _surroundings() -> str:
    """What a graph depends on besides the model and the settings: programs, this program's code, the processor."""
    versions = [_version_of(program) for program in _PROGRAMS]
    code = [_digest_of(path) for folder in _OWN_FOLDERS for path in _files_in(folder) if path.endswith(".py")]
    switches = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_SWITCHES))
    return repr((versions, code, switches, _processor()))


def _version_of(program: str) -> str:
    try:
        return importlib.metadata.version(program)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _processor() -> list[str]:
    """The processor's features, which decide what TensorFlow fuses."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next(([line] for line in file if line.startswith(("flags", "Features"))), [])
    except OSError:
        return []


def _files_in(folder: str) -> Iterable[str]:
    return sorted(filter(os.path.isfile, glob.glob(os.path.join(glob.escape(folder), "**"), recursive=True)))


def _digest_of(path: str) -> bytes:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            found.update(part)
    return found.digest()
