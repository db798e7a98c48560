"""Converter: a SavedModel becomes a network of OpenVINO (IR) that ends before the suppression of boxes.

A network is a folder of `model.xml`, `model.bin` and `detector.json`, which describes its outputs. Converting takes TensorFlow
and seconds, so another process does it, once for each user; the job itself imports only OpenVINO.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from models.metadata import DetectorMetadata, metadata_from_json, metadata_to_json
from models.own_python import command_of, environment
from models.user_cache import cache_folder
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.versions import first_line
from pipeline.detect.warmup_requests import keep_requests, read_requests
from pipeline.errors import ModelError

NETWORK = "model.xml"
_DESCRIPTION = "detector.json"
_OF_SUPPRESSION = ("StridedSlice", "Mul", "OneHot", "ArgMax")  # in `models.export.suppress`, between candidates and suppression
_KEPT = 8  # networks in the cache; the ones that were not used for longest go first


def check_installed() -> None:
    """Raises ModelError if OpenVINO is missing."""
    if not importlib.util.find_spec("openvino"):
        raise ModelError(
            "engine openvino: its package is missing; install the extra: pip install 'hybrid-detection-pipeline[openvino]'"
        )


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
    """The network of a SavedModel: from the user's cache, else converted there.

    Args:
      local: Its files on this machine.
      folder: Where they are from, for messages and as the model's name.
      model: Its description in the config.

    Raises:
      ModelError: OpenVINO is missing, or cannot convert the model.
    """
    check_installed()
    cache = os.path.join(cache_folder(), "openvino")
    network = os.path.join(cache, _key(local, folder, model))
    if not os.path.isdir(network):
        os.makedirs(cache, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=cache) as unfinished:
            whole = os.path.join(unfinished, "network")
            _convert_in_subprocess(local, folder, model, whole)
            if not os.path.isdir(network):  # else another process was faster
                os.rename(whole, network)
        for old in sorted(Path(cache).glob("[!.]*"), key=os.path.getmtime)[:-_KEPT]:
            for file in old.iterdir():
                file.unlink()
            old.rmdir()
    os.utime(network)
    return network


def _key(local: str, folder: str, model: ModelConfig) -> str:
    """A digest of all that a network depends on: files, description, programs."""
    programs = [importlib.metadata.version(program) for program in ("openvino", "tensorflow")]
    described = {name: value for name, value in dataclasses.asdict(model).items() if not name.startswith(("model_", "server_"))}
    digest = hashlib.sha256(json.dumps([folder, described, programs], default=list).encode())
    code = (Path(__file__).parent.glob("*.py"), Path(sys.modules[DetectorMetadata.__module__].__file__ or "").parent.glob("*.py"))
    names = [Path(name) for name in model.class_names or () if os.path.isfile(name)]
    for path in sorted([*Path(local).glob("**/*"), *names, *code[0], *code[1]]):
        if path.is_file():
            digest.update(path.name.encode("utf-8", "surrogateescape") + path.read_bytes())
    return digest.hexdigest()[:32]


def _convert_in_subprocess(local: str, folder: str, model: ModelConfig, network: str) -> None:
    asked = json.dumps([local, folder, dataclasses.asdict(model), network])
    done = subprocess.run(  # noqa: S603  this Python and this module
        command_of(__name__), input=asked, capture_output=True, text=True, check=False, env=environment()
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"the converter ended with {done.returncode}"])[-1]
        raise ModelError(said if said.startswith(f"model {folder}: ") else f"model {folder}: OpenVINO cannot convert it: {said}")


def main() -> None:
    """Runs in the process that converts."""
    local, folder, fields, network = json.load(sys.stdin)
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    try:
        convert(local, folder, ModelConfig(**given), network)
    except ModelError as err:
        sys.exit(str(err))


def convert(local: str, folder: str, model: ModelConfig, network: str) -> None:
    """Writes the network of a SavedModel; suppression by `models.export.suppress` is left to the pipeline.

    Raises:
      ModelError: TensorFlow cannot load the model, or OpenVINO cannot convert it.
    """
    from pipeline.detect.packed_output import is_parted
    from pipeline.detect.saved_model import frozen_model

    frozen = frozen_model(local, folder, model, DetectConfig(device="cpu", engine="openvino"))
    function, roles, metadata = frozen.function, frozen.roles, frozen.metadata
    if metadata.resize == "none":
        raise ModelError(
            f"model {folder}: takes images at their own size; leave out --xla and --engine, which compile it for one size"
        )
    if candidates := _before_suppression(function):
        # whether boxes that `suppress` would drop still overlap without it
        nms = frozen.described.nms if is_parted(frozen.described) else "pipeline"
        function, roles = candidates, ("boxes", "classes", "scores")
        metadata = dataclasses.replace(metadata, count_output="", nms=nms)
    batch = function.inputs[0].shape[0] or 1
    if batch > 1 and any(operation.type == "Where" for operation in function.graph.get_operations()):
        raise ModelError(f"model {folder}: picks rows of a whole batch, which would mix its images; use --engine tensorflow")
    try:
        write_network(network, _as_openvino(function, roles, [batch, *metadata.input_hw, 3]), metadata)
    except Exception as err:
        raise ModelError(f"model {folder}: OpenVINO cannot convert it: {_reason(err)}; use --engine tensorflow") from err
    keep_requests(network, read_requests(local, folder, metadata))


def _as_openvino(frozen: Any, roles: tuple[str, ...], shape: list[int]) -> Any:
    import openvino
    import tensorflow as tf

    with tempfile.TemporaryDirectory(prefix="openvino-") as folder:
        tf.io.write_graph(frozen.graph.as_graph_def(), folder, "model.pb", as_text=False)
        # `openvino.convert_model` does the same, but reports each conversion to OpenVINO's makers
        model = openvino.Core().read_model(os.path.join(folder, "model.pb"))
        for role, tensor in zip(roles, frozen.outputs, strict=True):
            model.output(tensor.name).get_tensor().set_names({role})
        model.reshape(shape)
        return model.clone()


def _reason(err: Exception) -> str:
    """The line of an error of OpenVINO that names the cause, which stands below its places in the source."""
    found = re.search(r"No conversion rule found for operations: [^\n]*", str(err))
    return found[0] if found else first_line(err)


def _before_suppression(frozen: Any) -> Any | None:
    """A frozen function that returns each candidate's box, best class and confidence; None if `suppress` is not in the graph."""
    import tensorflow as tf

    from pipeline.detect.tensorflow_internals import freeze

    last = [operation for operation in frozen.graph.get_operations() if operation.type == "CombinedNonMaxSuppression"]
    ends = [_candidates(tensor) for tensor in last[0].inputs[:2]] if len(last) == 1 else [None]
    if any(end is None for end in ends):
        return None
    network = frozen.prune(frozen.inputs, ends)

    @tf.function(input_signature=[tf.TensorSpec(frozen.inputs[0].shape, tf.uint8)], autograph=False)
    def predict(images: Any) -> dict[str, Any]:
        boxes, scores = network(images)
        return {"boxes": boxes, "scores": tf.reduce_max(scores, -1), "classes": tf.argmax(scores, -1, tf.int32)}

    return freeze(predict.get_concrete_function())


def _candidates(tensor: Any) -> Any | None:
    """The tensor of all candidates that `suppress` takes its best from; None in another graph."""
    while tensor.op.type in _OF_SUPPRESSION:
        tensor = tensor.op.inputs[0]
    return tensor.op.inputs[0] if tensor.op.type == "GatherV2" else None
