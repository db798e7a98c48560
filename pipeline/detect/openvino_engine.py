"""An engine over OpenVINO on the CPU: a pool of inference requests, each on a stream of the device."""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
from typing import Any

import numpy as np

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.engine import ModelFailed, OpenedModel, OutOfMemory
from pipeline.detect.openvino_convert import NETWORK, check_installed, converted, read_description
from pipeline.detect.process_memory import share_heaps, spare_modules
from pipeline.errors import ModelError
from pipeline.limits import available_cpus

_NO_MEMORY = ("bad_alloc", "allocate", "out of memory")  # in OpenVINO's messages; it has one class of errors
INT8 = "assets.extra/openvino_int8"  # folder of the int8 network that `detect-objects quantize` writes
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32"}  # of all but what the graph itself has in int8


class OpenVinoEngine:
    """A model compiled by OpenVINO; an `Engine`.

    A request that fails raises its error in the thread that waits for it. `AsyncInferQueue` is not used: it calls no callback for
    a request that fails, so an image would wait without end. Each request has one image, or the batch of a model of a fixed one.

    Args:
      network: Folder of the model in OpenVINO's format (`openvino_convert`).
      detect: Precision, threads, requests in flight, and the confidence below which boxes are dropped at once.

    Raises:
      ModelError: OpenVINO is missing, cannot compile the model, or does not have what the settings ask for.

    """

    def __init__(self, network: str, detect: DetectConfig):
        check_installed()
        if detect.device not in ("auto", "cpu") or detect.xla or detect.labels_per_box != "best":
            raise ModelError(
                "engine openvino: expected device auto or cpu, no xla, and labels_per_box best; use --engine tensorflow"
            )
        share_heaps(max(2, available_cpus()))
        self._network, self._settings = os.path.join(network, NETWORK), _settings(detect)
        self._score_threshold = detect.score_threshold
        self._compiling = threading.Lock()
        self._compile()

    def _compile(self) -> None:
        import openvino

        spare_modules()

        core = openvino.Core()
        try:
            compiled = core.compile_model(core.read_model(self._network), "CPU", self._settings)
        except RuntimeError as err:
            raise ModelError(f"engine openvino: cannot compile the model: {_reason(err)}") from err
        self.batch_sizes: tuple[int, ...] = (compiled.inputs[0].shape[0],)
        self._roles = [output.get_any_name() for output in compiled.outputs]
        self.concurrent_batches: int = compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
        free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(self.concurrent_batches):
            free.put(compiled.create_infer_request())
        self._free = free

    def run(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """Runs a batch on a free request; see `Engine`."""
        free = self._free
        request = free.get()
        try:
            request.start_async({0: pixels}, share_inputs=True)
            request.wait()
            arrays = {role: request.get_output_tensor(n).data for n, role in enumerate(self._roles)}
            return self._kept(arrays)
        except (RuntimeError, MemoryError) as err:
            if isinstance(err, MemoryError) or any(words in str(err) for words in _NO_MEMORY):
                self._compile_again(free)
                raise OutOfMemory(_reason(err)) from err
            raise ModelFailed(_reason(err)) from err
        finally:
            free.put(request)

    def close(self) -> None:
        """Frees memory and threads; no run may be under way."""
        del self._free

    def _compile_again(self, failed: queue.SimpleQueue[Any]) -> None:
        """Replaces all requests: a stream that could not allocate memory once fails on each further image."""
        with self._compiling:
            if self._free is failed:
                self._compile()

    def _kept(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Copies the outputs out of the request, without candidates that the threshold drops anyway."""
        if arrays["scores"].ndim == 2 and "count" not in arrays:
            kept = (arrays["scores"] >= self._score_threshold).any(axis=0)
            return {role: array[:, kept] for role, array in arrays.items()}
        return {role: array.copy() for role, array in arrays.items()}


def open_model(local: str, folder: str, model: ModelConfig, detect: DetectConfig) -> OpenedModel:
    """Opens the network of a SavedModel, which it converts if need be; for precision int8 the one in its folder.

    Raises:
      ModelError: It has no int8 network, OpenVINO is missing or cannot convert it, or lacks what the settings ask for.
    """
    try:
        network = os.path.join(local, INT8) if detect.precision == "int8" else converted(local, folder, model)
        metadata = read_description(network)
    except (OSError, ValueError) as err:
        raise ModelError(
            f"model {folder}: has no int8 network that can be read ({INT8}); make a version: detect-objects quantize"
        ) from err
    if model.name:
        metadata = dataclasses.replace(metadata, name=model.name)
    engine = OpenVinoEngine(network, detect)
    return OpenedModel(engine, metadata, engine.batch_sizes[0])


def _settings(detect: DetectConfig) -> dict[str, Any]:
    return {
        "PERFORMANCE_HINT": "THROUGHPUT",
        "INFERENCE_PRECISION_HINT": _PRECISIONS[detect.precision],
        "INFERENCE_NUM_THREADS": detect.intra_op_threads or available_cpus(),
        "ENABLE_CPU_PINNING": False,  # threads that decode need the same cores
        **({"NUM_STREAMS": detect.concurrent_batches} if detect.concurrent_batches else {}),
    }


def _reason(err: BaseException) -> str:
    """The last line of OpenVINO's message, which has its cause."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return (lines or [type(err).__name__])[-1][:300]
