"""An engine over TensorFlow: a SavedModel as one function of uint8 images, whose weights are constants.

The model describes itself (`models.metadata`); the config supplies the rest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from models.export import CANDIDATES, CANDIDATES_FLOAT16
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.describe_model import describe, own_metadata
from pipeline.detect.engine import COMPILED_SIZES, FunctionEngine, ModelFailed, OpenedModel, OutOfMemory
from pipeline.detect.families import read_notes
from pipeline.detect.golden import read_requests
from pipeline.detect.model_arrays import (
    PICKED,
    PICKS,
    Arrays,
    Signature,
    Tensor,
    feed_of,
    has_candidates,
    picked_candidates,
    split_outputs,
)
from pipeline.detect.tensorflow_internals import freeze
from pipeline.detect.tensorflow_setup import configure_tensorflow, uses_gpu, xla_cache_set_aside
from pipeline.detect.versions import first_line
from pipeline.errors import ModelDeviceError, ModelError

if TYPE_CHECKING:
    from tensorflow.errors import OpError

Call = Callable[[Any], Mapping[str, Any]]


def open_model(local: str, folder: str, model: ModelConfig, detect: DetectConfig) -> OpenedModel:
    """Opens a SavedModel; see `ENGINES`.

    Raises:
      ModelError: TensorFlow cannot load it, or it is no detector that is recognised.
    """
    tf = configure_tensorflow(detect)
    traced, gpu = traced_model(local, folder, model, detect), bool(tf.config.get_visible_devices("GPU"))
    compiled, note = _compiled(traced, folder, detect, gpu=gpu)
    call = compiled or _frozen_call(freeze_model(traced))
    requests = read_requests(local, folder, traced.metadata)
    batch = traced.batch or (1 if traced.metadata.resize == "none" else None)  # images of different sizes make no batch

    def run(pixels: np.ndarray, *, picks: bool = True) -> Arrays:
        try:
            outputs = call(tf.constant(pixels))
            if "passed" in outputs and picks:
                return picked_candidates(lambda role: np.asarray(outputs[role]), traced.metadata, detect)
            return {role: tensor.numpy() for role, tensor in outputs.items() if role not in PICKS}
        except tf.errors.ResourceExhaustedError as err:
            raise OutOfMemory(_reason(err)) from err
        except tf.errors.OpError as err:
            raise ModelFailed(_reason(err)) from err

    sizes = COMPILED_SIZES if gpu and compiled else ()
    engine = FunctionEngine(run, detect, batch, gpu=gpu, sizes=sizes, run_all_boxes=functools.partial(run, picks=False))
    return OpenedModel(engine, traced.metadata, traced.has_boolean_mask, requests, notes=(note,) if note else ())


def _compiled(traced: TracedModel, folder: str, detect: DetectConfig, *, gpu: bool) -> tuple[Call | None, str]:
    """The model's function compiled by XLA, on a GPU for each batch size; or None, and why not if it was to be.

    Its weights are variables: XLA would fold constants for minutes.
    """
    import tensorflow as tf

    mixed = detect.precision != "float32" and not traced.is_float16
    if detect.compiled == "no" or (detect.compiled == "auto" and (not gpu or mixed)):
        return None, ""
    if traced.metadata.resize == "none":
        return None, f"model {folder}: takes each image at its own size, so XLA does not compile it"
    if mixed:
        return None, f"model {folder}: XLA compiles no {detect.precision} of it; import it again, or leave out --compiled"
    sizes = (traced.batch,) if traced.batch else detect.batch_sizes or (COMPILED_SIZES if gpu else (1,))
    try:
        try:
            return _compiled_for(traced, sizes), ""
        except tf.errors.OpError as err:
            if "unsupported" in err.message:
                raise
            with xla_cache_set_aside() as had_files:
                if not had_files:
                    raise
                return _compiled_for(traced, sizes), ""  # a file of its cache was damaged
    except (tf.errors.OpError, ValueError) as err:
        return None, f"model {folder}: XLA cannot compile it, so it runs as it is: {_why_not(err)}"


def _compiled_for(traced: TracedModel, sizes: Sequence[int]) -> Call:
    import tensorflow as tf

    function: Call = tf.function(traced.predict, input_signature=[traced.spec], autograph=False, jit_compile=True)
    for size in sizes:
        try:
            function(tf.zeros((size, *traced.metadata.input_hw, 3), tf.uint8))
        except tf.errors.ResourceExhaustedError as err:
            if size == sizes[0]:
                raise OutOfMemory(_reason(err)) from err
            break  # the batcher finds the size that fits
    return function


def _why_not(err: Exception) -> str:
    """What XLA lacks, which its message names behind the function and the device."""
    text = first_line(err)
    return (text.partition(": ")[2] or text)[:200]


def _frozen_call(frozen: FrozenModel) -> Call:
    return lambda images: dict(zip(frozen.roles, frozen.function(images), strict=True))


def described_signature(
    local: str, folder: str, model: ModelConfig, detect: DetectConfig
) -> tuple[Any, Signature, Any, DetectorMetadata]:
    """A loaded SavedModel, its signature, the same to call, and its metadata: own or recognised, overridden by the config.

    A model of this project has a signature without suppression, which is the one that runs.

    Args:
      local: Its files on this machine.
      folder: Where it is from, for messages and as the model's name.
      model: Its description in the config.
      detect: How to run it.

    Raises:
      ModelError: TensorFlow cannot load it, or it is no detector that is recognised.
    """
    tf = configure_tensorflow(detect)
    described = own_metadata(local, folder)
    try:
        loaded = tf.saved_model.load(local)
    except Exception as err:
        of_device = uses_gpu() and isinstance(err, (tf.errors.InternalError, tf.errors.ResourceExhaustedError))
        kind = ModelDeviceError if of_device else ModelError  # its first use of CUDA
        raise kind(f"model {folder}: TensorFlow cannot load it: {first_line(err)}") from err
    if described and described.threshold_inputs and CANDIDATES in loaded.signatures and not model.signature:
        is_float16 = detect.precision == "float16" and detect.compiled != "no" and CANDIDATES_FLOAT16 in loaded.signatures
        signature_name = CANDIDATES_FLOAT16 if is_float16 else CANDIDATES
        described = dataclasses.replace(
            described, signature=signature_name, classes_output="", count_output="", nms="pipeline", threshold_inputs=False
        )
    name = model.signature or (described.signature if described else "serving_default")
    if name not in loaded.signatures:
        raise ModelError(
            f"model {folder}: expected a signature '{name}', it has {sorted(loaded.signatures)}; set model.signature"
        )
    function = loaded.signatures[name]
    signature, notes = _signature_of(function), functools.partial(read_notes, local)
    return loaded, signature, function, describe(signature, described, model, folder, detect, read_notes=notes)


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


class TracedModel(NamedTuple):
    """A SavedModel as one function of uint8 images, before it is traced.

    Of a model with candidates it returns `boxes` and `scores` of all of them, `best (n, M)`, the best score of each box, and the
    best ones where they are asked for, as `model_arrays.picked_candidates` reads them. Other models answer their own.

    Attributes:
      predict: From a tensor of images to outputs by role.
      spec: Of the images.
      metadata: What it returns.
      batch: Images of each run, of a model of a fixed batch; None for any number.
      is_float16: Whether it computes in float16 itself.
      has_boolean_mask: Whether it picks rows of a whole batch, with `tf.boolean_mask` or the like: which ones only shows on some
        images. `filter_boxes` of https://github.com/hunglc007/tensorflow-yolov4-tflite then reshapes them to `(N, -1, …)`.
      owner: Of the variables, for as long as the function runs.
    """

    predict: Call
    spec: Any
    metadata: DetectorMetadata
    batch: int | None
    is_float16: bool
    has_boolean_mask: bool
    owner: Any


class FrozenModel(NamedTuple):
    """A model as a traced function without variables.

    Attributes:
      function: Takes uint8 images, and returns the outputs in the order of `roles`.
      roles: Of the outputs.
    """

    function: Any
    roles: tuple[str, ...]


def traced_model(local: str, folder: str, model: ModelConfig, detect: DetectConfig, *, picks: bool = True) -> TracedModel:
    """Loads a SavedModel; see `described_signature`. With `picks`, a device picks the best boxes."""
    loaded, signature, call, described = described_signature(local, folder, model, detect)
    import tensorflow as tf

    xp, spec = tf.experimental.numpy, signature.inputs[described.input_name]
    batch = spec.shape[0] if spec.shape else None

    def predict(images: Any) -> dict[str, Any]:
        outputs = split_outputs(call(**feed_of(images, described, detect, xp, spec.dtype)), described, xp)
        if not has_candidates(signature, described):
            return outputs
        has_classes = bool(described.packed_layout) or signature.outputs[described.scores_output].rank == 3  # (n, M, C)
        outputs |= {"best": tf.reduce_max(outputs["scores"], -1)} if has_classes else {}
        return {**outputs, **_picked(outputs, detect)} if picks else outputs

    images = tf.TensorSpec((batch, *described.graph_hw, 3), tf.uint8)
    is_float16 = described.signature == CANDIDATES_FLOAT16
    return TracedModel(predict, images, described, batch, is_float16, signature.has_boolean_mask, loaded)


def freeze_model(traced: TracedModel) -> FrozenModel:
    """Traces a model, and makes constants of its weights, which TensorFlow and OpenVINO fold."""
    import tensorflow as tf

    function = tf.function(traced.predict, input_signature=[traced.spec], autograph=False)
    concrete = function.get_concrete_function()
    roles = tuple(sorted(concrete.structured_outputs))  # the order in which TensorFlow flattens a mapping
    return FrozenModel(freeze(concrete), roles)


def _picked(outputs: dict[str, Any], detect: DetectConfig) -> dict[str, Any]:
    """The best boxes, or pairs of box and class, of each image; see `model_arrays.picked_candidates`."""
    import tensorflow as tf

    boxes, scores, has_classes = outputs["boxes"], outputs["scores"], "best" in outputs
    several = has_classes and detect.labels_per_box == "several"
    many = tf.shape(scores)[-1]
    best = tf.reshape(scores, (tf.shape(scores)[0], -1)) if several else outputs.get("best", scores)
    over = best >= detect.score_threshold
    most = tf.minimum(PICKED, tf.shape(best)[1]) if best.shape[1] is None else min(PICKED, best.shape[1])
    sure, places = tf.math.top_k(tf.where(over, best, -1.0), most)  # not NaN
    rows = places // many if several else places
    if several:
        classes = places % many
    elif has_classes:
        classes = tf.argmax(tf.gather(scores, rows, batch_dims=1), -1, tf.int32)
    else:
        classes = tf.zeros_like(places)
    return {
        "picked_boxes": tf.gather(boxes, rows, batch_dims=1),
        "picked_scores": sure,
        "picked_classes": classes,
        "picked_places": places,
        "passed": tf.math.count_nonzero(over, 1, dtype=tf.int32),
    }


def _reason(err: OpError) -> str:
    """The last line of TensorFlow's message that is more than a node's name in brackets."""
    lines = [line.strip() for line in (err.message or "").splitlines()]
    return ([line for line in lines if line and not line.startswith("[[")] or [type(err).__name__])[-1][:300]
