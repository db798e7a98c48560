"""Loads a SavedModel as a TensorFlow function over uint8 images.

The model describes itself (`models.metadata`); the config supplies the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from models.export import CANDIDATES, suppress
from models.geometry import boxes_to_xyxy
from models.metadata import METADATA_PATH, DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import tensorflow_setup
from pipeline.detect.describe_model import describe, name_of_model, own_metadata
from pipeline.detect.families import read_notes
from pipeline.detect.model_arrays import feed_of, most_boxes, split_metadata, split_outputs
from pipeline.detect.remote_engine import RemoteServer, check_engine
from pipeline.detect.signature import Arrays, Signature, Tensor
from pipeline.detect.tensorflow_internals import freeze
from pipeline.detect.versions import ONNX_MODEL, first_line, incomplete_versions, is_remote, locate
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
    for newer in () if model.model_version else incomplete_versions(model.path, newer_than=version):
        missing = f"version {newer.name} is incomplete (missing {newer.missing}) and ignored for now"
        print(f"model {model.path}: {missing}", file=sys.stderr)
    if folder.endswith(".onnx"):
        return name_of_model(model, None, folder), version
    with local_copy(folder, METADATA_PATH) as local:
        return name_of_model(model, own_metadata(local, folder), folder), version


def described_signature(
    local: str, folder: str, model: ModelConfig, detect: DetectConfig, *, suppressed: bool = True
) -> tuple[Any, Any, DetectorMetadata]:
    """A loaded SavedModel, its signature to call, and its metadata: its own, or as recognised, overridden by the config.

    Args:
      local: Its files on this machine.
      folder: Where it is from, for messages and as the model's name.
      model: Its description in the config.
      detect: How to run it.
      suppressed: False for the signature without suppression, of a model that has one.

    Raises:
      ModelError: TensorFlow cannot load it, or it is no detector that is recognised.
    """
    tf = tensorflow_setup.configure_tensorflow(detect)
    described = own_metadata(local, folder)
    try:
        loaded = tf.saved_model.load(local)
    except Exception as err:
        raise ModelError(f"model {folder}: TensorFlow cannot load it: {first_line(err)}") from err
    several = detect.labels_per_box == "several"
    if described and described.threshold_inputs and several and CANDIDATES not in loaded.signatures:
        raise ModelError(f"model {folder}: labels_per_box several needs a model of this release; import or export it again")
    if described and described.threshold_inputs and CANDIDATES in loaded.signatures and (several or not suppressed):
        described = dataclasses.replace(
            described, signature=CANDIDATES, classes_output="", count_output="", nms="pipeline", threshold_inputs=False
        )
    name = model.signature or (described.signature if described else "serving_default")
    if name not in loaded.signatures:
        raise ModelError(
            f"model {folder}: expected a signature '{name}', it has {sorted(loaded.signatures)}; set model.signature"
        )
    signature = loaded.signatures[name]
    notes = functools.partial(read_notes, local)
    return loaded, signature, describe(_signature_of(signature), described, model, folder, detect, read_notes=notes)


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
        has_boolean_mask=any(
            node.op == "Where" for nodes in (graph.node, *(f.node_def for f in graph.library.function)) for node in nodes
        ),
    )


class FrozenModel(NamedTuple):
    """A SavedModel as a traced function without variables.

    Attributes:
      function: Takes uint8 images, and returns the outputs in the order of `roles`.
      roles: Of the outputs.
      metadata: What the function returns.
    """

    function: Any
    roles: tuple[str, ...]
    metadata: DetectorMetadata

    @property
    def batch(self) -> int | None:
        """Images of each run, of a model of a fixed batch; None for any number."""
        found: int | None = self.function.inputs[0].shape[0]
        return found

    @property
    def has_boolean_mask(self) -> bool:
        """Whether it picks rows of a whole batch, with `tf.boolean_mask` or the like: which ones only shows on some images.

        `filter_boxes` of https://github.com/hunglc007/tensorflow-yolov4-tflite then reshapes them to `(N, -1, …)`.
        """
        return any(operation.type == "Where" for operation in self.function.graph.get_operations())


def frozen_model(local: str, folder: str, model: ModelConfig, detect: DetectConfig, *, suppressed: bool = True) -> FrozenModel:
    """Loads a SavedModel as one function of uint8 images, with the thresholds bound; see `described_signature`.

    Candidates of a YOLO or DETR are suppressed in its graph, so that no image pays for all of them in NumPy; without
    `suppressed`, the function returns each candidate with its best class.
    """
    found = described_signature(local, folder, model, detect, suppressed=suppressed)
    _loaded, signature, described = found  # the first one owns the signature's variables
    import tensorflow as tf

    metadata, xp = split_metadata(described), tf.experimental.numpy
    is_raw = described.box_format == "grid" or described.signature == CANDIDATES or described.score_activation
    has_candidates = (is_raw or described.packed_layout) and described.packed_layout != "M,6"
    if has_candidates:
        metadata = dataclasses.replace(metadata, classes_output="classes")
    if has_candidates and suppressed:
        metadata = dataclasses.replace(metadata, box_format="xyxy", count_output="count", nms="model")
    batch = signature.structured_input_signature[1][described.input_name].shape[0]

    @tf.function(input_signature=[tf.TensorSpec((batch, *described.graph_hw, 3), tf.uint8)], autograph=False)
    def predict(images: Any) -> dict[str, Any]:
        outputs = split_outputs(signature(**feed_of(images, described, detect, xp)), described, xp)
        if not has_candidates:
            return outputs
        boxes, scores = (xp.asarray(outputs[role], "float32") for role in ("boxes", "scores"))
        if not suppressed:
            return {"boxes": boxes, "scores": tf.reduce_max(scores, -1), "classes": tf.argmax(scores, -1, tf.int32)}
        iou_threshold = detect.iou_threshold if described.nms == "pipeline" else 1.0  # no box overlaps another more
        found = suppress(
            boxes_to_xyxy(boxes, split_metadata(described).box_format, xp),
            scores,
            tf.constant(detect.score_threshold, tf.float32),
            tf.constant(iou_threshold, tf.float32),
            tf.constant(most_boxes(detect), tf.int32),
            several_labels=detect.labels_per_box == "several",
        )
        return {"count" if name == "num_detections" else name: value for name, value in found.items()}

    function = predict.get_concrete_function()
    roles = tuple(sorted(function.structured_outputs))  # the order in which TensorFlow flattens a mapping
    return FrozenModel(freeze(function), roles, metadata)


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
