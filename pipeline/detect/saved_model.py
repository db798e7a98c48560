"""From a SavedModel on disk to a `LoadedModel`: one optimised TensorFlow graph over uint8 images, behind the batch scheduler.

The model is asked what it is (`models.metadata`); what it does not say comes from the config. It is then frozen, rewritten by
TensorFlow's graph optimiser once (fusions; bfloat16 on request), and everything that was loaded to get there is released.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from models.metadata import METADATA_PATH, DetectorMetadata, read_metadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import joined_output, tensorflow_setup
from pipeline.detect.batching import BatchedModel
from pipeline.detect.describe_model import describe, name_of_model, pick_signature
from pipeline.detect.loaded_model import LoadedModel, ModelFailed, OutOfMemory
from pipeline.detect.process_memory import return_free_memory
from pipeline.detect.tensorflow_scheduler import Predict, TensorFlowScheduler
from pipeline.errors import ModelError
from pipeline.storage.globs import escape_glob

BUNDLED = "digits"
_WARMUP_PATH = "assets.extra/tf_serving_warmup_requests"
_FILTERED_DETECTIONS = 300
_CPU_LADDER = (1, 2, 4)  # on CPU larger batches gain nothing, and each of their images waits for all
_GPU_LADDER = (1, 2, 4, 8, 16, 32)


def locate(path: str) -> tuple[str, str]:
    """Finds the SavedModel that a path means: itself, or its newest version in TF Serving's layout `<path>/<integer>`.

    Returns:
      (folder of the SavedModel, version or "").

    Raises:
      ModelError: There is none.
    """
    from apache_beam.io.filesystems import FileSystems

    if path == BUNDLED:
        path = _bundled_model()
    path = path.rstrip("/")
    try:
        if FileSystems.exists(f"{path}/saved_model.pb"):
            version = path.rsplit("/", 1)[-1]
            return path, version if version.isdigit() else ""
        found = FileSystems.match([f"{escape_glob(path)}/*/saved_model.pb"])[0].metadata_list
    except Exception as err:
        raise ModelError(f"model {path}: cannot be reached: {_first_line(err)}") from err
    versions = {int(m.group(1)) for entry in found if (m := re.search(r"/(\d+)/saved_model\.pb$", entry.path))}
    if not versions:
        raise ModelError(
            f"model {path}: expected a SavedModel (saved_model.pb) or version folders <integer>/saved_model.pb there, "
            "found none; check --model"
        )
    return f"{path}/{max(versions)}", str(max(versions))


def name_and_version(model: ModelConfig) -> tuple[str, str]:
    """What rows will say of a model, found out without loading it.

    Raises:
      ModelError: It is missing, or cannot be understood.
    """
    folder, version = locate(model.path)
    with _local_copy(folder, METADATA_PATH) as local:
        return name_of_model(model, _described(local, folder), folder), version


def _described(local: str, folder: str) -> DetectorMetadata | None:
    try:
        return read_metadata(local)
    except ValueError as err:
        raise ModelError(f"model {folder}: {METADATA_PATH} cannot be understood: {_first_line(err)}") from err


def _bundled_model() -> str:
    """The bundled detector's folder of versions.

    Raises:
      ModelError: It is not in the user's cache, and cannot be written there.
    """
    from models.digits.cache import cached_digits

    try:
        return cached_digits()
    except OSError as err:
        raise ModelError(
            f"model {BUNDLED}: expected a cache that can be written, but: {_first_line(err)}; set XDG_CACHE_HOME to a folder"
        ) from err


def load(model: ModelConfig, detect: DetectConfig) -> LoadedModel:
    """Loads, freezes and optimises a detector, and runs every rung of its ladder on blank images.

    Raises:
      ModelError: It is missing, damaged, has no signature that fits, or fails on a blank image.
    """
    folder, version = locate(model.path)
    tf = tensorflow_setup.configure_tensorflow(detect)
    with _local_copy(folder) as local:
        described = _described(local, folder)
        try:
            loaded = tf.saved_model.load(local)
        except Exception as err:
            raise ModelError(f"model {folder}: TensorFlow cannot load it: {_first_line(err)}") from err
        signature = pick_signature(loaded.signatures, described, model, folder)
        notes = None if described else joined_output.read_notes(local, folder)
        metadata = describe(signature, described, model, folder, notes)
        try:
            requests = tuple(_warmup_requests(os.path.join(local, _WARMUP_PATH), metadata))
        except Exception as err:
            raise ModelError(f"model {folder}: {_WARMUP_PATH} cannot be read: {_first_line(err)}; repair or remove it") from err
    fixed_batch = signature.structured_input_signature[1][metadata.input_name].shape[0]
    predict = _optimised(_as_function(signature, metadata, detect), detect.precision)
    if metadata.joined_layout:
        metadata = joined_output.parted(metadata)
    del loaded, signature
    return_free_memory()  # optimising took several times the model
    engine = _batched(predict, metadata.input_hw, fixed_batch, detect)
    try:
        engine.warm_up()
    except (ModelFailed, OutOfMemory) as err:
        engine.close()
        raise ModelError(f"model {model.path}: fails on a blank image: {err}") from err
    return_free_memory()
    return LoadedModel(metadata, version, engine, requests)


def _batched(predict: Predict, input_hw: tuple[int, int], fixed_batch: int | None, detect: DetectConfig) -> BatchedModel:
    gpu = tensorflow_setup.uses_gpu()
    ladder = (fixed_batch,) if fixed_batch else detect.batch_sizes or (_GPU_LADDER if gpu else _CPU_LADDER)
    streams = tensorflow_setup.streams_of(detect, gpu)
    scheduler = TensorFlowScheduler(predict, input_hw, ladder, streams, detect.batch_timeout_ms)
    return BatchedModel(scheduler, input_hw, ladder, streams)


@contextmanager
def _local_copy(folder: str, files: str = "**") -> Iterator[str]:
    """The SavedModel, or just some of its files, as a local folder; what is on object storage is copied for that long."""
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


def _as_function(signature: Any, metadata: DetectorMetadata, detect: DetectConfig) -> Any:
    """The signature as a function of uint8 images alone: scaled to the model's range inside the graph, thresholds bound."""
    import tensorflow as tf

    low, high = metadata.value_range
    # with a class filter, more than asked for: other classes must not crowd the wanted ones out
    most = max(detect.max_detections, _FILTERED_DETECTIONS) if detect.classes else detect.max_detections
    batch = signature.structured_input_signature[1][metadata.input_name].shape[0]
    outputs = {
        "boxes": metadata.boxes_output,
        "scores": metadata.scores_output,
        "classes": metadata.classes_output,
        "count": metadata.count_output,
    }

    @tf.function(input_signature=[tf.TensorSpec((batch, *metadata.input_hw, 3), tf.uint8)], autograph=False)
    def predict(images: Any) -> dict[str, Any]:
        feed = {metadata.input_name: images}
        if metadata.input_dtype == "float32":
            feed[metadata.input_name] = tf.cast(images, tf.float32) * ((high - low) / 255.0) + low
        if metadata.threshold_inputs:
            feed["score_threshold"] = tf.constant(detect.score_threshold, tf.float32)
            feed["iou_threshold"] = tf.constant(detect.iou_threshold, tf.float32)
            feed["max_detections"] = tf.constant(most, tf.int32)
        found = signature(**feed)
        if metadata.joined_layout:
            return joined_output.part(found[metadata.boxes_output], metadata, detect, most)
        return {role: found[name] for role, name in outputs.items() if name}

    return predict.get_concrete_function()


def _optimised(function: Any, precision: str) -> Predict:
    """The function, optimised here, so that no call and no rung pays for it again; keeps nothing of what it came from."""
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    frozen = convert_variables_to_constants_v2(function, lower_control_flow=False)  # only constants can be folded
    graph = optimised_graph(frozen, precision)
    fed, fetched = frozen.inputs[0], [tensor.name for tensor in frozen.outputs]
    names = sorted(function.structured_outputs)  # the order in which TensorFlow flattens a mapping

    replaced = fed.name, f"^{fed.op.name}"  # the optimiser lets folded constants wait for the input

    # A function of its own: TensorFlow fuses convolutions with what follows them when it calls one, once it knows the device.
    # Within the scheduler's function nobody does: 22 instead of 14 CPU-ms an image at bfloat16.
    @tf.function(input_signature=[tf.TensorSpec(fed.shape, fed.dtype)], autograph=False)
    def predict(images: Any) -> dict[str, Any]:
        outputs = tf.import_graph_def(graph, dict.fromkeys(replaced, images), fetched, name="")
        return dict(zip(names, outputs, strict=True))

    called: Predict = predict.get_concrete_function()
    return called


def optimised_graph(frozen: Any, precision: str) -> Any:
    """A frozen function's `GraphDef` after TensorFlow's own rewrites.

    Args:
      frozen: A `ConcreteFunction` without variables.
      precision: `float32` or `bfloat16`.
    """
    from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
    from tensorflow.python.grappler import tf_optimizer
    from tensorflow.python.training.saver import export_meta_graph

    graph = export_meta_graph(graph_def=frozen.graph.as_graph_def(), graph=frozen.graph)
    for tensor in frozen.outputs:
        graph.collection_def["train_op"].node_list.value.append(tensor.name)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1
    optimised = tf_optimizer.OptimizeGraph(config, graph)
    if precision == "bfloat16":
        # in one pass, bfloat16 would come before batch normalisations are folded into their convolutions, and keep them apart
        config.graph_options.rewrite_options.auto_mixed_precision_onednn_bfloat16 = rewriter_config_pb2.RewriterConfig.ON
        graph.graph_def.CopyFrom(optimised)
        optimised = tf_optimizer.OptimizeGraph(config, graph)
    return optimised


def _warmup_requests(path: str, metadata: DetectorMetadata) -> Iterator[Any]:
    """Images of TF Serving's warm-up file: encoded ones, or arrays.

    Source of the format: https://www.tensorflow.org/tfx/serving/saved_model_warmup
    """
    if not os.path.isfile(path):
        return
    import tensorflow as tf
    from tensorflow_serving.apis import prediction_log_pb2

    for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
        for tensor in prediction_log_pb2.PredictionLog.FromString(record).predict_log.request.inputs.values():
            value = tf.make_ndarray(tensor)
            if tensor.dtype == tf.string.as_datatype_enum:
                yield from (bytes(encoded) for encoded in value.ravel())
            elif value.shape[1:] == (*metadata.input_hw, 3) and value.dtype.name == "uint8":
                yield value


def _first_line(err: Exception) -> str:
    return (str(err).strip().splitlines() or [type(err).__name__])[0][:300]
