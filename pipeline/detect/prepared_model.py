"""From an optimised graph to a `LoadedModel`: the graph as a function, behind the batch scheduler, every batch size warm."""

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
from pipeline.detect.batching import BatchedModel
from pipeline.detect.golden import GoldenImage
from pipeline.detect.loaded_model import LoadedModel, Memory, ModelFailed, OutOfMemory
from pipeline.detect.process_memory import return_free_memory
from pipeline.detect.tensorflow_internals import trace
from pipeline.detect.tensorflow_scheduler import Predict, TensorFlowScheduler, call
from pipeline.detect.tensorflow_setup import memory_in_use
from pipeline.errors import ModelError

_CPU_BATCH_SIZES = (1, 2, 4)  # on CPU larger batches gain nothing, and each of their images waits for all
_GPU_BATCH_SIZES = (1, 2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class OptimisedGraph:
    """A graph of uint8 images, and all that it needs.

    Attributes:
      graph: A `GraphDef`.
      weights: Its larger constants, by the names of their tensors; apart from it, for each copy of a message lets no other Python
        thread run meanwhile, and these are copied one by one.
      fed: Name of the tensor of images.
      fetched: Names of the tensors of its outputs, by the output's name.
      batch: How many images each call takes; None: any number.
      fused: Whether nothing is left to be optimised; else TensorFlow does the rest on a graph's device, when it is called first.
    """

    graph: Any
    weights: dict[str, np.ndarray]
    fed: str
    fetched: dict[str, str]
    batch: int | None
    fused: bool

    @property
    def weights_bytes(self) -> int:
        """What it has learnt, as bytes in memory."""
        return int(self.graph.ByteSize()) + sum(weight.nbytes for weight in self.weights.values())


@dataclasses.dataclass(frozen=True)
class PreparedModel:
    """What is left of a SavedModel once all that takes long is done. Another process may have made it.

    Attributes:
      folder: Where the model was found, for messages.
      version: Its version; "" where it has none.
      metadata: What it expects and returns.
      optimised: What it computes.
      warmup_requests: See `LoadedModel`.
      golden: See `LoadedModel`.
    """

    folder: str
    version: str
    metadata: DetectorMetadata
    optimised: OptimisedGraph
    warmup_requests: tuple[bytes | np.ndarray, ...] = ()
    golden: tuple[GoldenImage, ...] = ()


def start(prepared: PreparedModel, detect: DetectConfig, *, beside: bool = False) -> LoadedModel:
    """Makes a session of a prepared model, and runs every batch size of its batch sizes on blank images.

    Args:
      prepared: The model.
      detect: How it will run.
      beside: Whether another version is at work meanwhile. On a CPU it is left a core then: calls follow each other, for 1.6
        instead of 2.3 CPU-seconds with a model of 24 MB.

    Raises:
      ModelError: It fails on a blank image.
    """
    before = memory_in_use()
    with _short_turns() if beside else contextlib.nullcontext():
        scheduler, engine = _batched(prepared, detect)
    return_free_memory(circles=True)  # tracing took several times the model
    try:
        engine.warm_up(at_once=not beside or tensorflow_setup.uses_gpu())
    except (ModelFailed, OutOfMemory) as err:
        engine.close()
        raise ModelError(f"model {prepared.folder}: fails on a blank image: {err}") from err
    weights = prepared.optimised.weights_bytes
    memory = Memory(weights, max(0, memory_in_use() - before - weights), scheduler.gpu_bytes)
    return_free_memory()
    return LoadedModel(prepared.metadata, prepared.version, engine, prepared.warmup_requests, prepared.golden, memory)


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """While this lasts, Python's threads take turns each half a millisecond.

    Tracing is Python alone. Who decodes an image meanwhile waits for its turn many times, and each time for five milliseconds.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _batched(prepared: PreparedModel, detect: DetectConfig) -> tuple[TensorFlowScheduler, BatchedModel]:
    gpu, batch, input_hw = tensorflow_setup.uses_gpu(), prepared.optimised.batch, prepared.metadata.input_hw
    batch_sizes = (batch,) if batch else detect.batch_sizes or (_GPU_BATCH_SIZES if gpu else _CPU_BATCH_SIZES)
    concurrent_batches = tensorflow_setup.concurrent_batches_of(detect, gpu)
    predict = _function_of(prepared.optimised, input_hw)
    scheduler = TensorFlowScheduler(predict, input_hw, batch_sizes, concurrent_batches, detect.batch_timeout_ms)
    return scheduler, BatchedModel(scheduler, input_hw, batch_sizes, concurrent_batches)


def _function_of(optimised: OptimisedGraph, input_hw: tuple[int, int]) -> Predict:
    import tensorflow as tf

    replaced = optimised.fed, f"^{optimised.fed.partition(':')[0]}"  # the optimiser lets folded constants wait for the input

    def run(images: Any) -> list[Any]:
        given = {name: tf.constant(weight) for name, weight in optimised.weights.items()}
        given.update(dict.fromkeys(replaced, images))
        found: list[Any] = tf.import_graph_def(optimised.graph, given, list(optimised.fetched.values()), name="")
        return found

    # A function of its own: TensorFlow fuses convolutions with what follows them when it calls one, once it knows the device.
    # Within the scheduler's function nobody does: 22 instead of 14 CPU-ms an image at bfloat16; 50 for 49 where all is fused.
    function = trace(run, [tf.TensorSpec((optimised.batch, *input_hw, 3), tf.uint8)])
    return lambda images: dict(zip(optimised.fetched, call(function, [images], optimised=optimised.fused), strict=True))
