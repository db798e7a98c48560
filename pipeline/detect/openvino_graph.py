"""Converter: a TensorFlow function over uint8 images becomes an OpenVINO graph that ends before the suppression of boxes.

It needs TensorFlow and runs in the process that prepares a model (`load_in_subprocess`); the job itself imports only OpenVINO.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import tempfile
from typing import Any

import numpy as np

from models.metadata import DetectorMetadata, Suppressor
from pipeline.detect.tensorflow_internals import freeze
from pipeline.detect.versions import first_line
from pipeline.errors import ModelError

_OF_SUPPRESSION = ("StridedSlice", "Mul", "OneHot", "ArgMax")  # in `models.export.suppress`, between candidates and suppression


@dataclasses.dataclass(frozen=True)
class OpenVinoGraph:
    """A graph in OpenVINO's format (IR).

    Attributes:
      xml: Its operations, uint8.
      weights: Its constants, uint8.
      batch: Images in each call.
    """

    xml: np.ndarray
    weights: np.ndarray
    batch: int

    @property
    def weights_bytes(self) -> int:
        """Size in memory."""
        return self.weights.nbytes


def check_installed() -> None:
    """Raises ModelError if OpenVINO is missing."""
    if not importlib.util.find_spec("openvino"):
        raise ModelError(
            "engine openvino: its package is missing; install the extra: pip install 'hybrid-detection-pipeline[openvino]'"
        )


def converted(function: Any, metadata: DetectorMetadata, nms: Suppressor, folder: str) -> tuple[OpenVinoGraph, DetectorMetadata]:
    """Converts a `ConcreteFunction` over uint8 images; suppression by `models.export.suppress` is left to the pipeline.

    Args:
      function: Returns outputs by role.
      metadata: What it returns.
      nms: Whether boxes that `suppress` would drop still overlap without it.
      folder: The SavedModel, for messages.

    Returns:
      The graph, and what it returns.

    Raises:
      ModelError: OpenVINO is missing, or cannot convert the model.
    """
    check_installed()
    frozen = freeze(function)
    if candidates := _before_suppression(frozen):
        function, frozen = candidates, freeze(candidates)
        metadata = dataclasses.replace(metadata, count_output="", nms=nms)
    batch = frozen.inputs[0].shape[0] or 1
    if batch > 1 and any(operation.type == "Where" for operation in frozen.graph.get_operations()):
        raise ModelError(f"model {folder}: picks rows of a whole batch, which would mix its images; use --engine tensorflow")
    try:
        xml, weights = _intermediate_representation(frozen, sorted(function.structured_outputs), [batch, *metadata.input_hw, 3])
    except Exception as err:
        raise ModelError(f"model {folder}: OpenVINO cannot convert it: {_reason(err)}; use --engine tensorflow") from err
    return OpenVinoGraph(xml, weights, batch), metadata


def _reason(err: Exception) -> str:
    """The line of an error of OpenVINO that names the cause, which stands below its places in the source."""
    found = re.search(r"No conversion rule found for operations: [^\n]*", str(err))
    return found[0] if found else first_line(err)


def _before_suppression(frozen: Any) -> Any | None:
    """A function that returns each candidate's box, best class and its confidence; None if `suppress` is not in the graph."""
    import tensorflow as tf

    last = [operation for operation in frozen.graph.get_operations() if operation.type == "CombinedNonMaxSuppression"]
    ends = [_candidates(tensor) for tensor in last[0].inputs[:2]] if len(last) == 1 else [None]
    if any(end is None for end in ends):
        return None
    network = frozen.prune(frozen.inputs, ends)

    @tf.function(input_signature=[tf.TensorSpec(frozen.inputs[0].shape, tf.uint8)], autograph=False)
    def predict(images: Any) -> dict[str, Any]:
        boxes, scores = network(images)
        return {"boxes": boxes, "scores": tf.reduce_max(scores, -1), "classes": tf.argmax(scores, -1, tf.int32)}

    return predict.get_concrete_function()


def _candidates(tensor: Any) -> Any | None:
    """The tensor of all candidates that `suppress` takes its best from; None in another graph."""
    while tensor.op.type in _OF_SUPPRESSION:
        tensor = tensor.op.inputs[0]
    return tensor.op.inputs[0] if tensor.op.type == "GatherV2" else None


def _intermediate_representation(frozen: Any, roles: list[str], shape: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Converts a frozen function; `roles`: of its outputs, sorted as TensorFlow sorts a mapping."""
    import openvino
    import tensorflow as tf

    with tempfile.TemporaryDirectory(prefix="openvino-") as folder:
        tf.io.write_graph(frozen.graph.as_graph_def(), folder, "model.pb", as_text=False)
        # `openvino.convert_model` does the same, but reports each conversion to OpenVINO's makers
        model = openvino.Core().read_model(os.path.join(folder, "model.pb"))
        for role, tensor in zip(roles, frozen.outputs, strict=True):
            model.output(tensor.name).get_tensor().set_names({role})
        model.reshape(shape)
        return saved(model, folder)


def saved(model: Any, folder: str) -> tuple[np.ndarray, np.ndarray]:
    """Writes a model into an empty folder; returns its `xml` and `weights`."""
    import openvino

    openvino.save_model(model, os.path.join(folder, "model.xml"), compress_to_fp16=False)
    return tuple(np.fromfile(os.path.join(folder, f"model.{suffix}"), np.uint8) for suffix in ("xml", "bin"))  # type: ignore[return-value]
