"""Loads a SavedModel as a TensorFlow function over uint8 images.

The model describes itself (`models.metadata`); the config supplies the rest.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from models.metadata import METADATA_PATH, DetectorMetadata, read_metadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import packed_output, tensorflow_setup
from pipeline.detect.describe_model import (
    check_several_labels,
    describe,
    for_several_labels,
    name_of_model,
    pick_signature,
)
from pipeline.detect.families import read_notes
from pipeline.detect.numpy_model import IMAGENET_DEVIATION, IMAGENET_MEAN, most_boxes
from pipeline.detect.remote_server import RemoteServer, check_engine
from pipeline.detect.signature import Arrays, Signature, Tensor
from pipeline.detect.tensorflow_internals import freeze
from pipeline.detect.versions import ONNX_MODEL, first_line, is_remote, locate, partial_versions
from pipeline.errors import ModelError
from pipeline.storage.globs import escape_glob


def name_and_version(model: ModelConfig, engine: str = "tensorflow") -> tuple[str, str]:
    """Name and version that rows will have, without loading the model.

    Args:
      model: The model.
      engine: What runs it; a model server is asked.

    Raises:
      ModelError: The model is missing or malformed.
    """
    if is_remote(model.path):
        check_engine(model, engine)
        return name_of_model(model, None, model.path), RemoteServer(model, engine).version
    folder, version = locate(model.path, model.model_version)
    for newer in () if model.model_version else partial_versions(model.path, than=version):
        print(f"model {model.path}: version {newer.name} is left alone, since it lacks {newer.lacks} (yet)", file=sys.stderr)
    if folder.endswith(".onnx"):
        return name_of_model(model, None, folder), version
    with local_copy(folder, METADATA_PATH) as local:
        return name_of_model(model, _described(local, folder), folder), version


def _described(local: str, folder: str) -> DetectorMetadata | None:
    try:
        return read_metadata(local)
    except ValueError as err:
        raise ModelError(f"model {folder}: {METADATA_PATH} cannot be understood: {first_line(err)}") from err


def described_signature(local: str, folder: str, model: ModelConfig, detect: DetectConfig) -> tuple[Any, Any, DetectorMetadata]:
    """A loaded SavedModel, its signature to call, and its metadata: its own, or as recognised, overridden by the config.

    Args:
      local: Its files on this machine.
      folder: Where it is from, for messages and as the model's name.
      model: Its description in the config.
      detect: How to run it.

    Raises:
      ModelError: TensorFlow cannot load it, or it is no detector that is recognised.
    """
    tf = tensorflow_setup.configure_tensorflow(detect)
    described = _described(local, folder)
    try:
        loaded = tf.saved_model.load(local)
    except Exception as err:
        raise ModelError(f"model {folder}: TensorFlow cannot load it: {first_line(err)}") from err
    if described and described.threshold_inputs and detect.labels_per_box == "several":
        described = for_several_labels(described)
    signature = pick_signature(loaded.signatures, described, model, folder)
    notes = None if described else read_notes(local, folder)
    metadata = describe(_signature_of(signature), described, model, folder, notes)
    if detect.labels_per_box == "several":
        check_several_labels(metadata, folder)
    return loaded, signature, metadata


def _signature_of(function: Any) -> Signature:
    import tensorflow as tf

    def tensor(spec: Any, *, is_optional: bool = False) -> Tensor:
        return Tensor(None if spec.shape.rank is None else tuple(spec.shape), spec.dtype.name, is_optional)

    def run(feed: Arrays) -> Arrays:
        return {
            name: value.numpy() for name, value in function(**{key: tf.constant(value) for key, value in feed.items()}).items()
        }

    graph = function.graph.as_graph_def()
    return Signature(
        {
            name: tensor(spec, is_optional=function.function_type.parameters[name].optional)
            for name, spec in function.structured_input_signature[1].items()
        },
        {name: tensor(spec) for name, spec in function.structured_outputs.items()},
        run,
        picks_rows=any(
            node.op == "Where" for nodes in (graph.node, *(f.node_def for f in graph.library.function)) for node in nodes
        ),
    )


class FrozenModel(NamedTuple):
    """A SavedModel as a traced function without variables.

    Attributes:
      function: Takes uint8 images, and returns the outputs in the order of `roles`.
      roles: Of the outputs.
      described: What the SavedModel returns.
      metadata: What the function returns.
    """

    function: Any
    roles: tuple[str, ...]
    described: DetectorMetadata
    metadata: DetectorMetadata


def frozen_model(local: str, folder: str, model: ModelConfig, detect: DetectConfig) -> FrozenModel:
    """Loads a SavedModel as one function; see `described_signature`."""
    _loaded, signature, metadata = described_signature(local, folder, model, detect)  # it owns the signature's variables
    function = as_function(signature, metadata, detect)
    roles = tuple(sorted(function.structured_outputs))  # the order in which TensorFlow flattens a mapping
    parted = packed_output.parted(metadata) if packed_output.is_parted(metadata) else metadata
    return FrozenModel(freeze(function), roles, metadata, parted)


@contextmanager
def local_copy(folder: str, files: str = "**") -> Iterator[str]:
    """The SavedModel, or some of its files, as a local folder: a temporary copy if it is on object storage."""
    if "://" not in folder:
        yield folder
        return
    from apache_beam.io.filesystems import FileSystems

    is_file = folder.endswith(".onnx")
    copy = tempfile.mkdtemp(prefix="model-")
    try:
        for entry in FileSystems.match([escape_glob(folder) + ("" if is_file else f"/{files}")])[0].metadata_list:
            target = os.path.join(copy, ONNX_MODEL if is_file else entry.path[len(folder) :].lstrip("/"))
            if entry.path.endswith("/"):
                continue
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with FileSystems.open(entry.path, compression_type="uncompressed") as source, open(target, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 22)
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def as_function(signature: Any, metadata: DetectorMetadata, detect: DetectConfig) -> Any:
    """The signature as a function of uint8 images: scales them to the model's range, and binds the thresholds."""
    import tensorflow as tf

    low, high = metadata.value_range
    most = most_boxes(detect)
    batch = signature.structured_input_signature[1][metadata.input_name].shape[0]
    outputs = {
        "boxes": metadata.boxes_output,
        "scores": metadata.scores_output,
        "classes": metadata.classes_output,
        "count": metadata.count_output,
    }

    @tf.function(input_signature=[tf.TensorSpec((batch, *metadata.graph_hw, 3), tf.uint8)], autograph=False)
    def predict(images: Any) -> dict[str, Any]:
        images = images[..., ::-1] if metadata.channel_order == "bgr" else images
        if metadata.input_dtype == "float32":
            images = tf.cast(images, tf.float32) * ((high - low) / 255.0) + low
        if metadata.normalisation:
            images = (tf.cast(images, tf.float32) - IMAGENET_MEAN) / IMAGENET_DEVIATION
        feed = {metadata.input_name: images}
        if metadata.threshold_inputs:
            feed["score_threshold"] = tf.constant(detect.score_threshold, tf.float32)
            feed["iou_threshold"] = tf.constant(detect.iou_threshold, tf.float32)
            feed["max_detections"] = tf.constant(most, tf.int32)
        found = signature(**feed)
        if packed_output.is_parted(metadata):
            return packed_output.part(found, metadata, detect, most)
        return {role: found[name] for role, name in outputs.items() if name}

    return predict.get_concrete_function()
