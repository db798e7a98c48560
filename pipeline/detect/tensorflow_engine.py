"""An engine over TensorFlow: a SavedModel as one function of uint8 images, whose weights are constants.

The model describes itself (`models.metadata`); the config supplies the rest.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from models.export import CANDIDATES, suppress
from models.geometry import boxes_to_xyxy
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.describe_model import describe, own_metadata
from pipeline.detect.engine import FunctionEngine, ModelFailed, OpenedModel, OutOfMemory
from pipeline.detect.families import read_notes
from pipeline.detect.golden import read_requests
from pipeline.detect.model_arrays import Arrays, Signature, Tensor, feed_of, most_boxes, split_metadata, split_outputs
from pipeline.detect.tensorflow_internals import freeze
from pipeline.detect.tensorflow_setup import configure_tensorflow
from pipeline.detect.versions import first_line
from pipeline.errors import ModelError

if TYPE_CHECKING:
    from tensorflow.errors import OpError


def open_model(local: str, folder: str, model: ModelConfig, detect: DetectConfig) -> OpenedModel:
    """Opens a SavedModel; see `ENGINES`.

    Raises:
      ModelError: TensorFlow cannot load it, or it is no detector that is recognised.
    """
    if detect.precision == "int8":
        raise ModelError("precision int8: expected --engine openvino, got tensorflow")
    tf = configure_tensorflow(detect)
    frozen = frozen_model(local, folder, model, detect)
    requests = read_requests(local, folder, frozen.metadata)
    batch = frozen.batch or (1 if frozen.metadata.resize == "none" else None)  # images of different sizes make no batch

    def run(pixels: np.ndarray) -> dict[str, np.ndarray]:
        try:
            outputs = frozen.function(tf.constant(pixels))
            return {role: tensor.numpy() for role, tensor in zip(frozen.roles, outputs, strict=True)}
        except tf.errors.ResourceExhaustedError as err:
            raise OutOfMemory(_reason(err)) from err
        except tf.errors.OpError as err:
            raise ModelFailed(_reason(err)) from err

    engine = FunctionEngine(run, detect, batch, gpu=bool(tf.config.get_visible_devices("GPU")))
    return OpenedModel(engine, frozen.metadata, frozen.has_boolean_mask, requests)


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
    tf = configure_tensorflow(detect)
    described = own_metadata(local, folder)
    try:
        loaded = tf.saved_model.load(local)
    except Exception as err:
        raise ModelError(f"model {folder}: TensorFlow cannot load it: {first_line(err)}") from err
    raw = detect.labels_per_box == "several" or not suppressed
    if described and described.threshold_inputs and CANDIDATES in loaded.signatures and raw:
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
      batch: Images of each run, of a model of a fixed batch; None for any number.
      has_boolean_mask: Whether it picks rows of a whole batch, with `tf.boolean_mask` or the like: which ones only shows on some
        images. `filter_boxes` of https://github.com/hunglc007/tensorflow-yolov4-tflite then reshapes them to `(N, -1, …)`.
    """

    function: Any
    roles: tuple[str, ...]
    metadata: DetectorMetadata
    batch: int | None
    has_boolean_mask: bool


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
    frozen = freeze(function)
    masks = any(operation.type == "Where" for operation in frozen.graph.get_operations())
    return FrozenModel(frozen, roles, metadata, batch, masks)


def _reason(err: OpError) -> str:
    """The last line of TensorFlow's message that is more than a node's name in brackets."""
    lines = [line.strip() for line in (err.message or "").splitlines()]
    return ([line for line in lines if line and not line.startswith("[[")] or [type(err).__name__])[-1][:300]
