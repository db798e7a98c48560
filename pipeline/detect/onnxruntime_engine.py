"""Two engines over ONNX Runtime: ONNX files on a CPU or with CUDA, and with TensorRT."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.config.engines import ENGINES, lacks_precision
from pipeline.detect import onnx_graph
from pipeline.detect.describe_model import describe_onnx, onnx_file
from pipeline.detect.engine import (
    COMPILED_SIZES,
    FunctionEngine,
    ModelFailed,
    OpenedModel,
    OutOfMemory,
    check_installed,
    check_package,
    concurrent_batches_of,
)
from pipeline.detect.gpus import gpu_kind, take_gpu
from pipeline.detect.model_arrays import PICKS, Arrays, Signature, Tensor, channels_last, picked_candidates
from pipeline.detect.onnx_graph import PIXELS, PREFIX, add_steps, read_onnx
from pipeline.detect.user_cache import cache_folder, keep_newest
from pipeline.detect.versions import first_line
from pipeline.errors import ModelDeviceError, ModelError
from pipeline.limits import available_cpus, nvidia_gpus

_NO_MEMORY = (  # in its messages
    *("bad_alloc", "allocate memory", "out of memory", "OUT_OF_MEMORY", "ALLOC_FAILED"),
    "is smaller than requested",  # the limit of its own arena, `gpu_memory_mb`
    *("resource allocation failed", "cublasCreate(", "cudnnCreate("),  # of a handle of CUDA's libraries
)
_TYPES = {"float": "float32", "double": "float64"}  # of ONNX, where NumPy's name is another one
_CPU, _CUDA, _TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
_KEPT = 4  # newest models in the caches of float16 and of TensorRT's engines


def open_model(local: str, folder: str, model: ModelConfig, detect: DetectConfig) -> OpenedModel:
    """Opens an ONNX file; see `ENGINES`.

    Raises:
      ModelError: It is none, ONNX Runtime is missing, cannot load it or lacks what the settings ask for, or no detector is
        recognised.
    """
    file = onnx_file(local)
    if not file:
        raise ModelError(f"model {folder}: expected an ONNX file")
    check_installed(detect.engine if detect.engine in ENGINES else "onnxruntime")
    network = read_onnx(file, folder)
    plain = _plain_session(folder, file)
    inputs, outputs = ({one.name: _tensor(one) for one in ones} for ones in (plain.get_inputs(), plain.get_outputs()))
    signature = channels_last(Signature(inputs, outputs, functools.partial(_answers, plain)))
    metadata = describe_onnx(signature, local, folder, model, detect, properties=plain.get_modelmeta().custom_metadata_map)
    if detect.precision == "float16" and inputs[metadata.input_name].dtype != "float16":
        network = in_float16(network, folder)
    content, roles = add_steps(network, signature, metadata, detect, folder)
    engine = _OnnxRuntime(_opener(folder, content, detect), roles, metadata, detect)
    batch, sizes = signature.batch_of(metadata), COMPILED_SIZES if detect.engine == "tensorrt" else ()
    run_all_boxes = functools.partial(engine.run, picks=False)
    runs = FunctionEngine(engine.run, detect, batch, gpu=engine.gpu, sizes=sizes, run_all_boxes=run_all_boxes)
    return OpenedModel(runs, metadata)


class _OnnxRuntime:
    """A session, and another one in its place after a batch for which memory did not suffice.

    The arena of the first keeps what the batch has taken, and then has no memory for a smaller one either.
    Outputs stay on the device until they are read. Each thread queues a batch, so that one is copied while another computes.

    Args:
      open_session: Opens a session.
      roles: Of its outputs; see `onnx_graph.add_steps`.
      metadata: What they mean.
      detect: Threshold.
    """

    def __init__(self, open_session: Callable[[], Any], roles: tuple[str, ...], metadata: DetectorMetadata, detect: DetectConfig):
        self._open, self._lock = open_session, threading.Lock()
        self._roles, self._metadata, self._detect = roles, metadata, detect
        self._session: Any = open_session()
        self.gpu = _is_on_gpu(self._session)
        self._device = ("cuda", take_gpu(nvidia_gpus(), detect.device)) if self.gpu else ("cpu", 0)

    def _opened(self) -> Any:
        with self._lock:
            self._session = self._session or self._open()
            return self._session

    def run(self, pixels: np.ndarray, *, picks: bool = True) -> Arrays:
        """Runs a batch; see `Engine`. Without `picks` it reads all boxes."""
        session = None
        try:
            session = self._opened()
            binding = session.io_binding()
            binding.bind_cpu_input(PIXELS, pixels)
            for role in self._roles:
                binding.bind_output(PREFIX + role, *self._device)
            session.run_with_iobinding(binding)
            values = dict(zip(self._roles, binding.get_outputs(), strict=True))
            if "passed" in values and picks:
                return picked_candidates(lambda role: values[role].numpy(), self._metadata, self._detect)
            return {role: value.numpy() for role, value in values.items() if role not in PICKS}
        except Exception as err:  # its classes have no base of their own
            if not (isinstance(err, MemoryError) or any(words in f"{err} {err.__cause__}" for words in _NO_MEMORY)):
                raise ModelFailed(first_line(err)) from err
            with self._lock:
                if self._session is session:
                    self._session = None
            session = None  # else the traceback would keep it, and its memory
            raise OutOfMemory(first_line(err)) from err.with_traceback(None)


def in_float16(network: Any, folder: str) -> Any:
    """The network in float16, from the user's cache if it has been converted before."""
    import onnx

    check_package("onnxconverter_common", "precision float16 of an ONNX file")
    digest = hashlib.sha256(network.SerializeToString())
    digest.update(f"{importlib.metadata.version('onnxconverter-common')} {inspect.getsource(onnx_graph)}".encode())
    place = os.path.join(cache_folder(), "onnx-float16")
    kept = os.path.join(place, f"{digest.hexdigest()[:32]}.onnx")
    with contextlib.suppress(OSError, DecodeError):
        return onnx.load(kept)
    network = onnx_graph.to_float16(network, folder)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs seconds at each start
        os.makedirs(place, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=place) as unfinished:
            onnx.save(network, os.path.join(unfinished, "model.onnx"))
            os.replace(os.path.join(unfinished, "model.onnx"), kept)
        keep_newest(place, "*.onnx", _KEPT)
    return network


def _plain_session(folder: str, file: str) -> Any:
    """A session of the file as it is, on the CPU, which tells its inputs and outputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(file, options, providers=[_CPU])
    except Exception as err:
        raise ModelError(f"model {folder}: ONNX Runtime cannot load it: {first_line(err)}") from err


def _answers(session: Any, feed: Arrays) -> Arrays:
    return dict(zip([one.name for one in session.get_outputs()], session.run(None, dict(feed)), strict=True))


def _opener(folder: str, content: bytes, detect: DetectConfig) -> Callable[[], Any]:
    """Opens sessions of a file's content with the same settings, on the same GPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = detect.intra_op_threads or max(1, available_cpus() // concurrent_batches_of(detect, gpu=False))
    options.log_severity_level = 4  # each error is raised, too
    onnxruntime.set_default_logger_severity(3)  # errors, such as a library of CUDA that is missing
    available = onnxruntime.get_available_providers()
    providers = _providers(available, detect, content)
    if providers != [_CPU]:
        with contextlib.redirect_stdout(sys.stderr):
            onnxruntime.preload_dlls()  # CUDA's libraries that pip has installed
        if detect.engine == "tensorrt":  # and TensorRT's: https://github.com/microsoft/onnxruntime/issues/18597
            with contextlib.suppress(Exception):  # the session shows what is missing
                importlib.import_module("tensorrt")

    def open_session() -> Any:
        try:  # without its own way back to the CPU, which it takes after any error of CUDA, also when memory does not suffice
            session = onnxruntime.InferenceSession(content, options, providers=providers, enable_fallback=0)
        except Exception as err:
            kind = ModelError if providers == [_CPU] else ModelDeviceError  # the CPU has opened the file before
            raise kind(f"model {folder}: ONNX Runtime cannot load it: {first_line(err)}") from err
        if detect.engine == "tensorrt" and _TENSORRT not in session.get_providers():
            raise ModelError(
                "engine tensorrt: ONNX Runtime cannot load TensorRT's libraries; install the package tensorrt in the version of "
                "https://onnxruntime.ai/docs/execution-providers/TensorRT-ExecutionProvider.html#requirements"
            )
        if detect.device.startswith("gpu") and _CUDA not in session.get_providers():
            raise ModelError(
                f"device {detect.device}: ONNX Runtime has {', '.join(available)}, this process may use {nvidia_gpus()} GPUs; "
                "install onnxruntime-gpu[cuda,cudnn], or use --device cpu"
            )
        if detect.engine in ENGINES and (why := lacks_precision(detect.engine, detect.precision, gpu=_is_on_gpu(session))):
            raise ModelError(f"{why}; this machine's GPU cannot be used, and --device gpu says what is missing")
        return session

    return open_session


def _is_on_gpu(session: Any) -> bool:
    return bool(session.get_providers()[0] != _CPU)


def _providers(available: list[str], detect: DetectConfig, content: bytes) -> list[Any]:
    """CUDA, or TensorRT before it, with the number and the memory of the settings, where there is a GPU; else the CPU.

    Raises:
      ModelError: TensorRT is asked for, and is not there.
    """
    kind, _, number = detect.device.partition(":")
    has_gpu = kind != "cpu" and nvidia_gpus() > int(number or 0)
    if detect.engine == "tensorrt" and not (has_gpu and _TENSORRT in available):
        raise ModelError(
            f"engine tensorrt: ONNX Runtime has {', '.join(available)}, this process may use {nvidia_gpus()} GPUs; "
            f"install {ENGINES['tensorrt'].on_gpu}"
        )
    if not has_gpu or _CUDA not in available:
        return [_CPU]
    device = {"device_id": str(take_gpu(nvidia_gpus(), detect.device))}
    memory = {"gpu_mem_limit": str(detect.gpu_memory_mb * 1_048_576)} if detect.gpu_memory_mb else {}
    on_gpu: list[Any] = [(_CUDA, {**device, **memory})]
    if detect.engine == "tensorrt":
        # without `trt_fp16_enable` a network of types that are kept, else boxes would be decoded in float16, too:
        # https://github.com/microsoft/onnxruntime/pull/18707
        cache = {"trt_engine_cache_enable": "1", "trt_engine_cache_path": engine_cache(content)}
        on_gpu.insert(0, (_TENSORRT, {**device, **cache}))
    return [*on_gpu, _CPU]


def engine_cache(content: bytes) -> str:
    """The folder of TensorRT's engines for a file's content, on this GPU.

    ONNX Runtime finds an engine by the names in a graph (`TRTGenerateId`), which a version with other weights has, too:
    https://github.com/microsoft/onnxruntime/issues/6455
    """
    place, digest = os.path.join(cache_folder(), "tensorrt"), hashlib.sha256(content)
    digest.update(gpu_kind().encode())
    folder = os.path.join(place, digest.hexdigest()[:32])
    with contextlib.suppress(OSError):  # where nothing can be written, ONNX Runtime keeps nothing either
        os.makedirs(folder, exist_ok=True)
        os.utime(folder)  # it is in use
        keep_newest(place, "*", _KEPT)
    return folder


def _tensor(one: Any) -> Tensor:
    """An input or output; ONNX Runtime has names, or None, for sizes that are free."""
    dtype = one.type.removeprefix("tensor(").removesuffix(")")
    return Tensor(tuple(size if isinstance(size, int) else None for size in one.shape), _TYPES.get(dtype, dtype))
