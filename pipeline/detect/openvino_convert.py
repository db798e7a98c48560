"""Converter: a SavedModel becomes a network of OpenVINO (IR) that ends before the suppression of boxes.

A network is a folder of `model.xml`, `model.bin` and `detector.json`, which describes its outputs, in the hidden folder
`.openvino/` of the version. Converting takes TensorFlow and seconds, so another process does it, once; a job itself imports only
OpenVINO.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.metadata import DetectorMetadata, metadata_from_json, metadata_to_json
from pipeline import own_python
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.engine import check_installed
from pipeline.detect.golden import keep_requests, read_requests
from pipeline.detect.model_arrays import split_metadata
from pipeline.detect.user_cache import cache_folder, keep_newest
from pipeline.detect.versions import content_of_all, first_line
from pipeline.errors import ModelError
from pipeline.log_lines import console

if TYPE_CHECKING:
    from pipeline.detect.tensorflow_engine import FrozenModel

# OpenVINO reports each import and each conversion over the network, unasked, from a process of its own; without this package it
# reports nothing
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

NETWORK = "model.xml"
HIDDEN = ".openvino"  # folder in a version
_DESCRIPTION = "detector.json"
_KEPT = 4  # newest networks in a place


def read_description(network: str) -> DetectorMetadata:
    """What a network returns."""
    return metadata_from_json(Path(network, _DESCRIPTION).read_text(encoding="utf-8"))


def write_network(network: str, model: Any, metadata: DetectorMetadata) -> None:
    """Writes an OpenVINO model and what it returns into a folder."""
    import openvino

    os.makedirs(network, exist_ok=True)
    openvino.save_model(model, os.path.join(network, NETWORK), compress_to_fp16=False)
    Path(network, _DESCRIPTION).write_text(metadata_to_json(metadata), encoding="utf-8")


def converted(local: str, folder: str, model: ModelConfig) -> str:
    """The network of a SavedModel, which is converted once beside it; in the user's cache where nothing can be written there.

    Args:
      local: Its files on this machine.
      folder: Where they are from, for messages and as the model's name.
      model: Its description in the config.

    Raises:
      ModelError: OpenVINO or TensorFlow is missing, or OpenVINO cannot convert the model.
    """
    check_installed("openvino")
    key = _key(local, model)
    beside, cache = os.path.join(local, HIDDEN), os.path.join(cache_folder(), "openvino")
    for place in (beside, cache):
        if os.path.isdir(os.path.join(place, key)):
            return os.path.join(place, key)
    check_installed("tensorflow", needed_by=f"model {folder}, a SavedModel,")
    if "://" not in folder:  # else `local` is a temporary copy
        try:
            return _convert_into(beside, key, local, folder, model)
        except OSError as err:
            console.info("model %s: the network for OpenVINO goes to %s: %s", folder, cache, err.strerror)
    return _convert_into(cache, key, local, folder, model)


def _convert_into(place: str, key: str, local: str, folder: str, model: ModelConfig) -> str:
    os.makedirs(place, exist_ok=True)
    network = os.path.join(place, key)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=place) as unfinished:
        whole = os.path.join(unfinished, "network")
        _convert_in_subprocess(local, folder, model, whole)
        if not os.path.isdir(network):  # else another process was faster
            os.rename(whole, network)
    keep_newest(place, "[!.]*", _KEPT)
    return network


def _key(local: str, model: ModelConfig) -> str:
    """A digest of all that a network depends on: files, description, programs. Not TensorFlow, which may be gone by now."""
    described = {
        name: value for name, value in dataclasses.asdict(model).items() if not name.startswith(("model_", "server_", "path"))
    }
    of_all = [described, importlib.metadata.version("openvino"), content_of_all(local)]
    digest = hashlib.sha256(json.dumps(of_all, default=list).encode())
    names = [Path(name) for name in model.class_names or () if os.path.isfile(name)]
    code = [file for module in (__file__, own_python.__file__) for file in sorted(Path(module).parent.glob("*.py"))]
    for path in (*names, *code):  # each part in an order of its own, so that a copy elsewhere has the same key
        digest.update(path.name.encode("utf-8", "surrogateescape") + path.read_bytes())
    return digest.hexdigest()[:32]


def _convert_in_subprocess(local: str, folder: str, model: ModelConfig, network: str) -> None:
    asked = json.dumps([local, folder, dataclasses.asdict(model), network])
    done = subprocess.run(  # noqa: S603  this Python and this module
        own_python.command_of(__name__), input=asked, capture_output=True, text=True, check=False, env=own_python.environment()
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"the converter ended with {done.returncode}"])[-1]
        raise ModelError(said if said.startswith(f"model {folder}: ") else f"model {folder}: OpenVINO cannot convert it: {said}")


def main() -> None:
    """Runs in the process that converts."""
    local, folder, fields, network = json.load(sys.stdin)
    try:
        convert(local, folder, ModelConfig(**fields), network)
    except ModelError as err:
        sys.exit(str(err))


def convert(local: str, folder: str, model: ModelConfig, network: str) -> None:
    """Writes the network of a SavedModel, with the steps before and behind it; suppression is left to the pipeline.

    Raises:
      ModelError: TensorFlow cannot load the model, or OpenVINO cannot convert it.
    """
    from pipeline.detect.tensorflow_engine import freeze_model, traced_model

    traced = traced_model(local, folder, model, DetectConfig(device="cpu", engine="openvino"), picks=False)
    metadata, batch = split_metadata(traced.metadata), traced.batch or 1
    if metadata.resize == "none":
        raise ModelError(f"model {folder}: takes images at their own size; leave out --engine, which compiles it for one size")
    if batch > 1 and traced.has_boolean_mask:
        raise ModelError(f"model {folder}: picks rows of a whole batch, which would mix its images; use --engine tensorflow")
    try:
        write_network(network, _as_openvino(freeze_model(traced), [batch, *metadata.input_hw, 3]), metadata)
    except Exception as err:
        raise ModelError(f"model {folder}: OpenVINO cannot convert it: {_reason(err)}; use --engine tensorflow") from err
    keep_requests(network, read_requests(local, folder, metadata))


def _as_openvino(frozen: FrozenModel, shape: list[int]) -> Any:
    import openvino
    import tensorflow as tf

    with tempfile.TemporaryDirectory(prefix="openvino-") as folder:
        tf.io.write_graph(frozen.function.graph.as_graph_def(), folder, "model.pb", as_text=False)
        model = openvino.Core().read_model(os.path.join(folder, "model.pb"))
        for role, tensor in zip(frozen.roles, frozen.function.outputs, strict=True):
            model.output(tensor.name).get_tensor().set_names({role})
        model.reshape(shape)
        return model.clone()


def _reason(err: Exception) -> str:
    """The line of an error of OpenVINO that names the cause, which stands below its places in the source."""
    found = re.search(r"No conversion rule found for operations: [^\n]*", str(err))
    return found[0] if found else first_line(err)
