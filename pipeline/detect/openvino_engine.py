"""An engine over OpenVINO on the CPU: a pool of inference requests, each on a stream of the device."""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.describe_model import describe_onnx, name_of_model, onnx_file, own_metadata
from pipeline.detect.engine import ModelFailed, OpenedModel, OutOfMemory, check_installed
from pipeline.detect.golden import kept_requests
from pipeline.detect.model_arrays import PICKS, Arrays, Signature, Tensor, candidates_of, channels_last, split_metadata
from pipeline.detect.onnx_graph import PIXELS, PREFIX, add_steps, read_onnx
from pipeline.detect.openvino_convert import NETWORK, converted, read_description
from pipeline.detect.process_memory import freeze_gc
from pipeline.detect.versions import first_line
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
      read: Reads the model, whose input are uint8 images of a fixed batch.
      metadata: What its outputs mean, by their names.
      detect: Precision, threads and requests in flight.

    Raises:
      ModelError: OpenVINO cannot compile the model.
    """

    gpu = False  # on a machine with one a note says so

    def __init__(self, read: Callable[[], Any], metadata: DetectorMetadata, detect: DetectConfig):
        self._read, self._metadata, self._detect, self._settings = read, metadata, detect, _settings(detect)
        self._compiling = threading.Lock()
        self._compile()

    def _compile(self) -> None:
        import openvino

        freeze_gc()
        try:
            model = self._read()
            self._names = [output.get_any_name() for output in model.outputs]  # compiled, an output may have more of them
            compiled = openvino.Core().compile_model(model, "CPU", self._settings)
        except RuntimeError as err:
            raise ModelError(f"engine openvino: cannot compile the model: {_reason(err)}") from err
        self.batch_sizes: tuple[int, ...] = (compiled.inputs[0].shape[0],)
        self._has_candidates = "best" in self._names or (self._metadata.nms == "pipeline" and "classes" not in self._names)
        self.concurrent_batches: int = compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
        free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(self.concurrent_batches):
            free.put(compiled.create_infer_request())
        self._free = free

    def run(self, pixels: np.ndarray) -> Arrays:
        """Runs a batch on a free request; see `Engine`."""
        return self._run(pixels, candidates=self._has_candidates)

    def run_all_boxes(self, pixels: np.ndarray) -> Arrays:
        """See `Engine`."""
        return self._run(pixels, candidates=False)

    def _run(self, pixels: np.ndarray, *, candidates: bool) -> Arrays:
        free = self._free
        request = free.get()
        try:
            request.start_async({0: pixels}, share_inputs=True)
            request.wait()
            found = {name: request.get_output_tensor(n).data for n, name in enumerate(self._names)}
            if candidates:
                return candidates_of(found, self._metadata, self._detect)
            return {role: array.copy() for role, array in found.items()}  # the next run overwrites the request's
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


def open_model(local: str, folder: str, model: ModelConfig, detect: DetectConfig) -> OpenedModel:
    """Opens an ONNX file, or the network of a SavedModel, which it converts if need be; for int8 the one in its folder.

    Raises:
      ModelError: It has no int8 network, OpenVINO is missing or cannot convert it.
    """
    check_installed("openvino")
    if file := onnx_file(local):
        return _open_onnx(file, local, folder, model, detect)
    network = os.path.join(local, INT8) if detect.precision == "int8" else _converted(local, folder, model)
    try:
        metadata = read_description(network)
    except (OSError, ValueError) as err:
        missing = f"has no int8 network that can be read ({INT8}); make a version: detect-objects quantize"
        damaged = f"its network for OpenVINO cannot be read: {first_line(err)}; delete {network}"
        raise ModelError(f"model {folder}: {missing if detect.precision == 'int8' else damaged}") from err
    if detect.labels_per_box == "several" and metadata.nms == "pipeline" and metadata.classes_output:  # as of release 0.1.0
        raise ModelError(f"model {folder}: its int8 network has one class a box: quantize it again, or leave out labels_per_box")
    metadata = dataclasses.replace(metadata, name=name_of_model(model, own_metadata(local, folder), folder))
    return OpenedModel(open_network(network, detect), metadata, warmup_requests=kept_requests(network))


def _converted(local: str, folder: str, model: ModelConfig) -> str:
    try:
        return converted(local, folder, model)
    except OSError as err:
        raise ModelError(
            f"model {folder}: its network for OpenVINO can be written neither beside it nor into the cache: {first_line(err)}; "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from err


def open_network(network: str, detect: DetectConfig) -> OpenVinoEngine:
    """The engine of a network of `openvino_convert`, whose outputs have the names of their roles."""
    import openvino

    metadata = split_metadata(read_description(network))
    return OpenVinoEngine(lambda: openvino.Core().read_model(os.path.join(network, NETWORK)), metadata, detect)


def _open_onnx(file: str, local: str, folder: str, model: ModelConfig, detect: DetectConfig) -> OpenedModel:
    """Each request has one image, where the file allows any number."""
    import openvino

    core, network = openvino.Core(), read_onnx(file, folder)
    try:
        plain = core.read_model(file)
    except RuntimeError as err:
        raise ModelError(f"model {folder}: OpenVINO cannot read it: {_reason(err)}; try --engine onnxruntime") from err
    inputs, outputs = ({one.get_any_name(): _tensor(one) for one in ones} for ones in (plain.inputs, plain.outputs))

    def run(feed: Arrays) -> Arrays:
        model = plain.clone()
        model.reshape({name: list(array.shape) for name, array in feed.items()})
        found = core.compile_model(model, "CPU")(dict(feed))
        return {name: found[place] for place, name in enumerate(outputs)}  # an output that is compiled may have several names

    signature = channels_last(Signature(inputs, outputs, run))
    properties = plain.get_rt_info("framework").value if plain.has_rt_info("framework") else {}
    metadata = describe_onnx(signature, local, folder, model, detect, properties=properties)
    if metadata.resize == "none":
        raise ModelError(f"model {folder}: takes images at their own size; use --engine onnxruntime")
    content, roles = add_steps(network, signature, metadata, detect, folder)
    batch = signature.batch_of(metadata) or 1

    def read() -> Any:
        """Without what picks boxes on a device: here memory is the same, and OpenVINO orders them more slowly than NumPy."""
        found = core.read_model(content)
        kept = [role for role in roles if role not in PICKS]
        results = []
        for role in kept:
            results.append(found.output(PREFIX + role))
            results[-1].get_tensor().set_names({role})
        small = openvino.Model(results, found.get_parameters(), "detector")
        small.reshape({PIXELS: [batch, *metadata.input_hw, 3]})
        return small

    return OpenedModel(OpenVinoEngine(read, metadata, detect), metadata)


def _tensor(one: Any) -> Tensor:
    shape = one.get_partial_shape()
    sizes = tuple(None if size.is_dynamic else size.get_length() for size in shape) if shape.rank.is_static else None
    return Tensor(sizes, one.get_element_type().to_dtype().name)


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
