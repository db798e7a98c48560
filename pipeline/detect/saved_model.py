"""Loads a SavedModel and makes one optimised TensorFlow graph over uint8 images of it.

The model describes itself (`models.metadata`); the config supplies the rest. TensorFlow then freezes the model and optimises the
graph once (fusions; bfloat16 on request), and everything loaded on the way is released.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from models.metadata import METADATA_PATH, DetectorMetadata, Suppressor, read_metadata
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
from pipeline.detect.golden import GOLDEN, read_golden
from pipeline.detect.loaded_model import LoadedModel
from pipeline.detect.openvino_graph import converted
from pipeline.detect.prepared_cache import entry_of, keep_in_cache, read_prepared, settings_of_graph
from pipeline.detect.prepared_model import OptimisedGraph, PreparedModel, start
from pipeline.detect.process_memory import return_free_memory
from pipeline.detect.remote_server import RemoteServer, check_engine
from pipeline.detect.tensorflow_internals import freeze, meta_graph, optimise
from pipeline.detect.versions import files_of, first_line, is_remote, lacking, locate, partial_versions
from pipeline.errors import ModelError
from pipeline.storage.globs import escape_glob

_WARMUP_PATH = "assets.extra/tf_serving_warmup_requests"
_FILTERED_DETECTIONS = 300
_IMAGENET_MEAN, _IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_WEIGHT_BYTES = 1 << 14  # larger constants are kept apart from the graph
_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


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
    with local_copy(folder, METADATA_PATH) as local:
        return name_of_model(model, _described(local, folder), folder), version


def _described(local: str, folder: str) -> DetectorMetadata | None:
    try:
        return read_metadata(local)
    except ValueError as err:
        raise ModelError(f"model {folder}: {METADATA_PATH} cannot be understood: {first_line(err)}") from err


def load(model: ModelConfig, detect: DetectConfig) -> LoadedModel:
    """Loads, freezes and optimises a detector, and warms every batch size.

    Raises:
      ModelError: The model is missing, damaged or being written, has no matching signature, or fails on a blank image.
    """
    folder, version = locate(model.path, model.model_version)
    files = files_of(folder)
    if missing := lacking(files):
        raise ModelError(f"model {folder}: lacks {missing}; copy it whole, then start again")
    tensorflow_setup.configure_tensorflow(detect)
    prepared = prepared_model(folder, version, model, detect, gpu=tensorflow_setup.uses_gpu())
    if files_of(folder) != files:
        raise ModelError(f"model {folder}: its files changed while it was loaded; start again once it is copied")
    return_free_memory()  # optimising took several times the model
    return start(prepared, detect)


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
    metadata = describe(signature, described, model, folder, notes)
    if detect.labels_per_box == "several":
        check_several_labels(metadata, folder)
    return loaded, signature, metadata


def prepared_model(folder: str, version: str, model: ModelConfig, detect: DetectConfig, *, gpu: bool) -> PreparedModel:
    """A detector after the slow part of loading: from the user's cache, else loaded, frozen, optimised, and kept there.

    Args:
      folder: Its SavedModel.
      version: Its version.
      model: Its description in the config.
      detect: How to run it.
      gpu: Whether on a GPU.

    Raises:
      ModelError: The model is missing or damaged, or has no matching signature.
    """
    with local_copy(folder) as local:
        entry = entry_of(local, folder, version, model, detect, gpu=gpu)
        if cached := read_prepared(entry, local, folder, version, model=model, detect=detect):
            return cached
        prepared = _prepare(local, folder, version, model, detect, gpu=gpu)
        if entry == entry_of(local, folder, version, model, detect, gpu=gpu):  # else its files have changed meanwhile
            keep_in_cache(entry, prepared)
    return prepared


def _prepare(local: str, folder: str, version: str, model: ModelConfig, detect: DetectConfig, *, gpu: bool) -> PreparedModel:
    _loaded, signature, metadata = described_signature(local, folder, model, detect)  # it owns the signature's variables
    detect = settings_of_graph(detect)  # the graph may depend on no other, since its entry of the cache does not
    try:
        requests = tuple(_warmup_requests(os.path.join(local, _WARMUP_PATH), metadata))
    except Exception as err:
        raise ModelError(f"model {folder}: {_WARMUP_PATH} cannot be read: {first_line(err)}; repair or remove it") from err
    try:
        golden = read_golden(local)
    except (OSError, ValueError) as err:
        raise ModelError(f"model {folder}: {GOLDEN} cannot be read: {first_line(err)}; repair or remove it") from err
    if metadata.resize == "none" and (detect.xla or detect.engine != "tensorflow"):
        raise ModelError(
            f"model {folder}: takes images at their own size; leave out --xla and --engine, which compile it for one size"
        )
    function = as_function(signature, metadata, detect)
    nms: Suppressor = metadata.nms if packed_output.is_parted(metadata) else "pipeline"
    if packed_output.is_parted(metadata):
        metadata = packed_output.parted(metadata)
    if detect.engine == "openvino":
        graph, metadata = converted(function, metadata, nms, folder)
        return PreparedModel(folder, version, metadata, graph, requests, golden)
    # TensorFlow makes no function of operations fused in bfloat16; XLA has its own fusions
    fused = detect.precision == "float32" and not (gpu or detect.xla)
    return PreparedModel(folder, version, metadata, _optimised(function, detect.precision, fused=fused), requests, golden)


@contextmanager
def local_copy(folder: str, files: str = "**") -> Iterator[str]:
    """The SavedModel, or some of its files, as a local folder: a temporary copy if it is on object storage."""
    if "://" not in folder:
        yield folder
        return
    from apache_beam.io.filesystems import FileSystems

    copy = tempfile.mkdtemp(prefix="model-")
    try:
        for entry in FileSystems.match([f"{escape_glob(folder)}/{files}"])[0].metadata_list:
            target = os.path.join(copy, entry.path[len(folder) :].lstrip("/"))
            if entry.path.endswith("/"):
                continue
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with FileSystems.open(entry.path, compression_type="uncompressed") as source, open(target, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 22)
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def as_function(signature: Any, metadata: DetectorMetadata, detect: DetectConfig) -> Any:
    """The signature as a traced function of uint8 images; see `as_eager_function`."""
    import tensorflow as tf

    batch = signature.structured_input_signature[1][metadata.input_name].shape[0]
    spec = tf.TensorSpec((batch, *metadata.graph_hw, 3), tf.uint8)
    predict = as_eager_function(signature, metadata, detect)
    return tf.function(predict, input_signature=[spec], autograph=False).get_concrete_function()


def as_eager_function(signature: Any, metadata: DetectorMetadata, detect: DetectConfig) -> Callable[[Any], dict[str, Any]]:
    """The signature as a function of uint8 images: scales them to the model's range, and binds the thresholds."""
    import tensorflow as tf

    low, high = metadata.value_range
    # more with a class filter: other classes must not crowd out the wanted ones
    most = max(detect.max_detections, _FILTERED_DETECTIONS) if detect.classes else detect.max_detections
    outputs = {
        "boxes": metadata.boxes_output,
        "scores": metadata.scores_output,
        "classes": metadata.classes_output,
        "count": metadata.count_output,
    }

    def predict(images: Any) -> dict[str, Any]:
        images = images[..., ::-1] if metadata.channel_order == "bgr" else images
        if metadata.input_dtype == "float32":
            images = tf.cast(images, tf.float32) * ((high - low) / 255.0) + low
        if metadata.normalisation:
            images = (tf.cast(images, tf.float32) - _IMAGENET_MEAN) / _IMAGENET_DEVIATION
        feed = {metadata.input_name: images}
        if metadata.threshold_inputs:
            feed["score_threshold"] = tf.constant(detect.score_threshold, tf.float32)
            feed["iou_threshold"] = tf.constant(detect.iou_threshold, tf.float32)
            feed["max_detections"] = tf.constant(most, tf.int32)
        found = signature(**feed)
        if packed_output.is_parted(metadata):
            return packed_output.part(found, metadata, detect, most)
        return {role: found[name] for role, name in outputs.items() if name}

    return predict


def _optimised(function: Any, precision: str, *, fused: bool) -> OptimisedGraph:
    frozen = freeze(function)
    names = sorted(function.structured_outputs)  # the order in which TensorFlow flattens a mapping
    fetched = dict(zip(names, (tensor.name for tensor in frozen.outputs), strict=True))
    graph = optimised_graph(frozen, precision, fused=fused)
    weights = _take_weights(graph, keep=fetched.values())
    return OptimisedGraph(graph, weights, frozen.inputs[0].name, fetched, frozen.inputs[0].shape[0], fused)


def optimised_graph(frozen: Any, precision: str, *, fused: bool) -> Any:
    """A frozen function's `GraphDef` after TensorFlow's rewrites.

    Args:
      frozen: A `ConcreteFunction` without variables.
      precision: `float32` or `bfloat16`.
      fused: Whether to fuse float32 convolutions with the operations behind them, for a CPU.
    """
    from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2

    graph = meta_graph(frozen)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1
    optimised = optimise(config, graph)
    # in the first pass, both rewrites would come before batch normalisations are folded into convolutions, and prevent that
    if precision == "bfloat16":
        graph.graph_def.CopyFrom(optimised)
        config.graph_options.rewrite_options.auto_mixed_precision_onednn_bfloat16 = rewriter_config_pb2.RewriterConfig.ON
        return optimise(config, graph)
    if not fused:
        return optimised
    if not any(node.op == "_FusedBatchNormEx" for node in optimised.node):  # tied to a Relu instead: 28 for 34 ms if fused whole
        graph.graph_def.CopyFrom(optimised)
    config.graph_options.rewrite_options.meta_optimizer_iterations = (
        rewriter_config_pb2.RewriterConfig.ONE
    )  # the next change nothing
    _place(graph.graph_def, _CPU)  # TensorFlow fuses only what it knows the device of
    optimised = optimise(config, graph)
    _place(optimised, "")
    return optimised


def _take_weights(graph_def: Any, keep: Collection[str]) -> dict[str, Any]:
    """Removes the larger constants from a graph; returns them by tensor name."""
    import tensorflow as tf

    floats = [dtype.as_datatype_enum for dtype in (tf.float32, tf.bfloat16, tf.float16)]
    constants = [node for node in graph_def.node if node.op == "Const" and node.attr["dtype"].type in floats]
    taken = [node for node in constants if node.ByteSize() > _WEIGHT_BYTES and f"{node.name}:0" not in keep]
    weights = {f"{node.name}:0": tf.make_ndarray(node.attr["value"].tensor) for node in taken}
    waited_for = {f"^{node.name}" for node in taken}
    rest = [node for node in graph_def.node if f"{node.name}:0" not in weights]
    for node in rest:
        inputs = [name for name in node.input if name not in waited_for]
        del node.input[:]
        node.input.extend(inputs)
    left = type(graph_def)(node=rest, library=graph_def.library, versions=graph_def.versions)
    graph_def.CopyFrom(left)
    return weights


def _place(graph_def: Any, device: str) -> None:
    for node in graph_def.node:
        node.device = device


def _warmup_requests(path: str, metadata: DetectorMetadata) -> Iterator[Any]:
    """Encoded images or arrays of a warm-up file: https://www.tensorflow.org/tfx/serving/saved_model_warmup."""
    if not os.path.isfile(path):
        return
    import tensorflow as tf
    from tensorflow_serving.apis import prediction_log_pb2

    for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
        for tensor in prediction_log_pb2.PredictionLog.FromString(record).predict_log.request.inputs.values():
            value = tf.make_ndarray(tensor)
            if tensor.dtype == tf.string.as_datatype_enum:
                yield from (bytes(encoded) for encoded in value.ravel())
            elif tf.TensorShape(value.shape[1:]).is_compatible_with((*metadata.graph_hw, 3)) and value.dtype.name == "uint8":
                yield value
