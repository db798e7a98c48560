"""Turns an optimised graph into a `LoadedModel`: a function behind the batch scheduler, warmed at every batch size."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.detect import tensorflow_setup
from pipeline.detect.batcher import Batcher
from pipeline.detect.engine import ModelFailed, OutOfMemory
from pipeline.detect.golden import GoldenImage
from pipeline.detect.loaded_model import LoadedModel, Memory
from pipeline.detect.openvino_engine import OpenVinoEngine
from pipeline.detect.openvino_graph import OpenVinoGraph
from pipeline.detect.process_memory import return_free_memory
from pipeline.detect.tensorflow_engine import Predict, TensorFlowEngine, call
from pipeline.detect.tensorflow_internals import trace
from pipeline.detect.tensorflow_setup import memory_in_use
from pipeline.errors import ModelError

_CPU_BATCH_SIZES = (1, 2, 4)  # on a CPU larger batches gain nothing, and each image waits for the whole batch
_GPU_BATCH_SIZES = (1, 2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class OptimisedGraph:
    """A graph over uint8 images.

    Attributes:
      graph: A `GraphDef`.
      weights: Its larger constants, by tensor name. Apart from the graph: copying a message blocks all other Python threads.
      fed: Name of the input tensor.
      fetched: Names of the output tensors, by output.
      batch: Images in each call; None: any number.
      fused: Whether the graph is fully optimised; else TensorFlow optimises it for its device at the first call.
    """

    graph: Any
    weights: dict[str, np.ndarray]
    fed: str
    fetched: dict[str, str]
    batch: int | None
    fused: bool

    @property
    def weights_bytes(self) -> int:
        """Size in memory."""
        return int(self.graph.ByteSize()) + sum(weight.nbytes for weight in self.weights.values())

    @property
    def picks_rows(self) -> bool:
        """Whether it picks rows of a whole batch, with `tf.boolean_mask` or the like: which ones only shows on some images.

        `filter_boxes` of https://github.com/hunglc007/tensorflow-yolov4-tflite then reshapes them to `(N, -1, …)`.
        """
        return any(node.op == "Where" for node in self.graph.node)


@dataclasses.dataclass(frozen=True)
class PreparedModel:
    """A SavedModel after the slow part of loading, which another process may do.

    Attributes:
      folder: The SavedModel, for messages.
      version: As in `LoadedModel`, like all that follow but `optimised`.
      metadata: What the model expects and returns.
      optimised: What it computes, in the format of its engine.
      warmup_requests: Images on which it must not fail.
      golden: Images with expected objects.
    """

    folder: str
    version: str
    metadata: DetectorMetadata
    optimised: OptimisedGraph | OpenVinoGraph
    warmup_requests: tuple[bytes | np.ndarray, ...] = ()
    golden: tuple[GoldenImage, ...] = ()


def start(prepared: PreparedModel, detect: DetectConfig, *, beside: bool = False) -> LoadedModel:
    """Makes a session of a prepared model, and warms every batch size with blank images.

    Args:
      prepared: The model.
      detect: How to run it.
      beside: Whether another version is in use meanwhile. On a CPU the calls then leave it a core: they run one after another,
        and take 1.6 instead of 2.3 CPU-seconds with a model of 24 MB.

    Raises:
      ModelError: The model fails on a blank image.
    """
    before = memory_in_use()
    with _short_turns() if beside else contextlib.nullcontext():
        engine = _engine(prepared, detect)
    batcher = Batcher(engine, prepared.metadata.graph_hw, detect.batch_timeout_ms)
    return_free_memory(circles=True)  # tracing took several times the model
    try:
        notes = _isolate_if_mixing(batcher, prepared)
        batcher.warm_up(at_once=not beside or tensorflow_setup.uses_gpu())
    except (ModelFailed, OutOfMemory) as err:
        batcher.close()
        raise ModelError(f"model {prepared.folder}: fails on a blank image: {err}") from err
    weights = prepared.optimised.weights_bytes
    memory = Memory(weights, max(0, memory_in_use() - before - weights), engine.gpu_bytes)
    return_free_memory()
    return LoadedModel(prepared.metadata, prepared.version, batcher, prepared.warmup_requests, prepared.golden, memory, notes)


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Lets Python's threads take turns each 0.5 ms instead of 5 ms, so that tracing does not hold up threads that decode."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _isolate_if_mixing(batcher: Batcher, prepared: PreparedModel) -> tuple[str, ...]:
    """Gives a model that mixes the images of a batch one at a time; returns a note of it."""
    optimised = prepared.optimised
    picks = isinstance(optimised, OptimisedGraph) and optimised.picks_rows
    try:
        if batcher.batch_sizes == (1,) or not (picks or batcher.mixes_images()):
            return ()
    except OutOfMemory:
        return ()  # the warm-up finds the batch size that fits
    batcher.isolate(optimised.batch or 1)
    mixes = "picks rows of a whole batch, which would mix its images" if picks else "mixes the images of a batch"
    note = f"model {prepared.folder} {mixes}: it gets one image at a time (batch size {optimised.batch or 1})"
    print(note, file=sys.stderr)
    return (note,)


def _engine(prepared: PreparedModel, detect: DetectConfig) -> TensorFlowEngine | OpenVinoEngine:
    if isinstance(prepared.optimised, OpenVinoGraph):
        return OpenVinoEngine(prepared.optimised, detect)
    gpu, metadata = tensorflow_setup.uses_gpu(), prepared.metadata
    batch = prepared.optimised.batch or (1 if metadata.resize == "none" else None)  # images of different sizes make no batch
    batch_sizes = (batch,) if batch else detect.batch_sizes or (_GPU_BATCH_SIZES if gpu else _CPU_BATCH_SIZES)
    concurrent_batches = tensorflow_setup.concurrent_batches_of(detect, gpu)
    function = _function_of(prepared.optimised, metadata.graph_hw)
    return TensorFlowEngine(function, metadata.graph_hw, batch_sizes, concurrent_batches)


def _function_of(optimised: OptimisedGraph, input_hw: tuple[int | None, int | None]) -> Predict:
    import tensorflow as tf

    replaced = optimised.fed, f"^{optimised.fed.partition(':')[0]}"  # folded constants may depend on the input's node

    def run(images: Any) -> list[Any]:
        given = {name: tf.constant(weight) for name, weight in optimised.weights.items()}
        given.update(dict.fromkeys(replaced, images))
        found: list[Any] = tf.import_graph_def(optimised.graph, given, list(optimised.fetched.values()), name="")
        return found

    # A function of its own: TensorFlow fuses convolutions with the next operation when it calls a function, for the function's
    # device. Within the scheduler's function it does not: 22 instead of 14 CPU-ms an image at bfloat16.
    function = trace(run, [tf.TensorSpec((optimised.batch, *input_hw, 3), tf.uint8)])
    return lambda images: dict(zip(optimised.fetched, call(function, [images], optimised=optimised.fused), strict=True))
