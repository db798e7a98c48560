"""An engine over OpenVINO on the CPU: a pool of inference requests, each on a stream of the device, one image at a time."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.config import DetectConfig
from pipeline.detect.loaded_model import ModelFailed, OutOfMemory, Output
from pipeline.detect.openvino_graph import OpenVinoGraph, check_installed
from pipeline.detect.process_memory import return_free_memory, spare_modules
from pipeline.detect.tensorflow_setup import keep_to_cores
from pipeline.errors import ModelError
from pipeline.limits import available_cpus

_THREAD_IMAGES = 4  # that a thread of the detector brings at once
_NO_MEMORY = ("bad_alloc", "allocate", "out of memory")  # in OpenVINO's messages; it has one class of errors
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32"}  # of all but what the graph itself has in int8


class OpenVinoEngine:
    """A model compiled by OpenVINO; an `Engine`.

    A request that fails raises its error in the thread that waits for it. `AsyncInferQueue` is not used: it calls no callback for
    a request that fails, so an image would wait without end. Each request has one image; only a model of a fixed batch
    gets a batch, filled with copies of the last image; after an error its images run one by one.

    Args:
      graph: The model.
      detect: Precision, threads, requests in flight, and the confidence below which boxes are dropped at once.

    Raises:
      ModelError: OpenVINO is missing, cannot compile the model, or does not have what the settings ask for.

    Attributes:
      gpu_bytes: None, as on any CPU.
    """

    gpu_bytes: int | None = None

    def __init__(self, graph: OpenVinoGraph, detect: DetectConfig):
        check_installed()
        if detect.device not in ("auto", "cpu") or detect.xla or detect.labels_per_box != "best":
            raise ModelError(
                "engine openvino: expected device auto or cpu, no xla, and labels_per_box best; use --engine tensorflow"
            )
        keep_to_cores(detect.cpu_affinity)
        self._graph, self._settings = graph, _settings(detect)
        self._batch, self._score_threshold = graph.batch, detect.score_threshold
        self._compiling = threading.Lock()
        self._compile()

    def _compile(self) -> None:
        import openvino

        spare_modules()

        core = openvino.Core()
        try:
            model = core.read_model(self._graph.xml.tobytes(), openvino.Tensor(self._graph.weights))
            compiled = core.compile_model(model, "CPU", self._settings)
        except RuntimeError as err:
            raise ModelError(f"engine openvino: cannot compile the model: {_reason(err)}") from err
        self._roles = [output.get_any_name() for output in compiled.outputs]
        self._input_shape = tuple(compiled.inputs[0].shape)
        self._requests: int = compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
        free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(self._requests):
            free.put(compiled.create_infer_request())
        self._free = free

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The one batch size."""
        return (self._batch,)

    @property
    def images_in_flight(self) -> int:
        """Enough for a thread of the detector at each request."""
        return self._requests * max(_THREAD_IMAGES, self._batch)

    def __call__(self, images: Sequence[np.ndarray]) -> list[Output | ModelFailed]:
        """Runs images, as many at once as requests are free; see `Engine`."""
        batches = [images[first : first + self._batch] for first in range(0, len(images), self._batch)]
        outputs: list[Output | ModelFailed] = []
        while batches:
            free = self._free
            requests = _taken(free, len(batches))
            running, batches = batches[: len(requests)], batches[len(requests) :]
            try:
                for request, batch in zip(requests, running, strict=True):
                    request.start_async({0: self._filled(batch)}, share_inputs=True)
                results = [self._finished(request, len(batch)) for request, batch in zip(requests, running, strict=True)]
            except OutOfMemory:
                self._compile_again(free)
                raise
            finally:
                for request in requests:
                    with contextlib.suppress(RuntimeError):
                        request.wait()  # after an error in another one
                    free.put(request)
            for batch, result in zip(running, results, strict=True):
                alone = len(batch) > 1 and isinstance(result[0], ModelFailed)
                outputs += [self([image])[0] for image in batch] if alone else result
        return outputs

    def warm_up(self, *, at_once: bool = True) -> None:
        """Runs each request once on blank images, to allocate its memory.

        Raises:
          OutOfMemory: Memory does not suffice.
          ModelFailed: The model fails on blank images.
        """
        blank = np.zeros(self._input_shape[1:], np.uint8)
        for output in self([blank] * self._requests * self._batch):
            if isinstance(output, ModelFailed):
                raise output

    def close(self) -> None:
        """Frees memory and threads; no call may be under way."""
        del self._free
        return_free_memory(circles=True)

    def _compile_again(self, failed: queue.SimpleQueue[Any]) -> None:
        """Replaces all requests: a stream that could not allocate memory once fails on each further image."""
        with self._compiling:
            if self._free is failed:
                self._compile()

    def _filled(self, batch: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack([*batch, *[batch[-1]] * (self._batch - len(batch))])

    def _finished(self, request: Any, count: int) -> list[Output | ModelFailed]:
        try:
            request.wait()
        except (RuntimeError, MemoryError) as err:
            if isinstance(err, MemoryError) or any(words in str(err) for words in _NO_MEMORY):
                raise OutOfMemory(_reason(err)) from err
            return [ModelFailed(_reason(err))] * count
        seconds = request.latency / 1e3
        arrays = {role: request.get_output_tensor(n).data for n, role in enumerate(self._roles)}
        return [
            Output(self._kept({role: array[n] for role, array in arrays.items()}), *((0, 0.0) if n else (self._batch, seconds)))
            for n in range(count)
        ]

    def _kept(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Copies an image's outputs out of the request, without candidates that the threshold drops anyway."""
        if arrays["scores"].ndim == 1 and "count" not in arrays:
            kept = arrays["scores"] >= self._score_threshold
            return {role: array[kept] for role, array in arrays.items()}
        return {role: array.copy() for role, array in arrays.items()}


def _settings(detect: DetectConfig) -> dict[str, Any]:
    return {
        "PERFORMANCE_HINT": "THROUGHPUT",
        "INFERENCE_PRECISION_HINT": _PRECISIONS[detect.precision],
        "INFERENCE_NUM_THREADS": detect.intra_op_threads or available_cpus(),
        "ENABLE_CPU_PINNING": False,  # threads that decode need the same cores
        **({"NUM_STREAMS": detect.concurrent_batches} if detect.concurrent_batches else {}),
    }


def _taken(free: queue.SimpleQueue[Any], most: int) -> list[Any]:
    """Up to `most` free requests. Waits only for the first: threads that hold some and wait for others would never end."""
    requests = [free.get()]
    with contextlib.suppress(queue.Empty):
        while len(requests) < most:
            requests.append(free.get_nowait())
    return requests


def _reason(err: BaseException) -> str:
    """The last line of OpenVINO's message, which has its cause."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return (lines or [type(err).__name__])[-1][:300]
