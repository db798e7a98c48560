"""Sets TensorFlow's threads, device and memory in this process. The settings of the first model hold for the process's life."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from models.quiet import gc_paused, quiet_stderr
from pipeline.config import DetectConfig
from pipeline.detect.process_memory import cap_malloc_arenas, freeze_gc
from pipeline.detect.share_gpus import take_gpu
from pipeline.detect.tensorflow_internals import import_without_keras
from pipeline.errors import ModelError
from pipeline.limits import available_cpus, resident_bytes


def configure_tensorflow(detect: DetectConfig) -> Any:
    """Imports TensorFlow with the threads, device and memory of the settings; later calls change nothing.

    Raises:
      ModelError: The machine lacks the device.
    """
    cap_malloc_arenas(max(2, available_cpus()))
    with quiet_stderr(), gc_paused():
        tf = import_without_keras()
    freeze_gc()
    # of functions that are traced from now on
    tf.config.optimizer.set_experimental_options({"auto_mixed_precision_onednn_bfloat16": detect.precision == "bfloat16"})
    gpu = _chosen_gpu(detect.device, tf.config.list_physical_devices("GPU"))
    try:
        _use_gpu(gpu, detect.gpu_memory_mb)
        _use_threads(detect, gpu is not None)
    except RuntimeError:  # TensorFlow has started already
        pass
    return tf


def uses_gpu() -> bool:
    """Whether TensorFlow uses a GPU in this process; it is not imported for the answer."""
    tf = sys.modules.get("tensorflow")
    return bool(tf and tf.config.get_visible_devices("GPU"))


def memory_in_use() -> int:
    """Bytes in use: TensorFlow's peak on a GPU, else this process's resident memory."""
    if not uses_gpu():
        return resident_bytes()
    import tensorflow as tf

    return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])


def gpu_bytes(detect: DetectConfig) -> int | None:
    """GPU memory that TensorFlow may use; None on a CPU, or where NVIDIA's driver does not tell."""
    if not uses_gpu():
        return None
    if detect.gpu_memory_mb:
        return detect.gpu_memory_mb * 1_048_576
    import tensorflow as tf

    number = tf.config.get_visible_devices("GPU")[0].name.rpartition(":")[2]
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", f"--id={number}"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 1_048_576  # noqa: S603
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def concurrent_batches_of(detect: DetectConfig, gpu: bool) -> int:
    """Concurrent batches: as set, else two on a GPU (one computes, one is fed), and one more than cores on a CPU, up to four."""
    return detect.concurrent_batches or (2 if gpu else min(4, available_cpus() + 1))


def _chosen_gpu(device: str, gpus: list[Any]) -> Any | None:
    """The GPU for `auto`, `cpu`, `gpu` or `gpu:<number>` (without a number one that few processes use); None for the CPU."""
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "gpu") or (number and not number.isdigit()):
        raise ModelError(f"device: expected auto, cpu, gpu or gpu:<number>, got {device!r}")
    if kind == "cpu":
        return None
    index = int(number) if number else take_gpu(len(gpus))
    if kind == "gpu" and len(gpus) <= index:
        raise ModelError(f"device {device}: TensorFlow sees {len(gpus)} GPUs; use --device cpu or auto")
    return gpus[index] if index < len(gpus) else None


def _use_gpu(gpu: Any | None, memory_mb: int | None) -> None:
    import tensorflow as tf

    tf.config.set_visible_devices([] if gpu is None else [gpu], "GPU")
    if gpu is None:
        return
    if memory_mb:
        tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=memory_mb)])
    else:
        tf.config.experimental.set_memory_growth(gpu, True)


def _use_threads(detect: DetectConfig, gpu: bool) -> None:
    import tensorflow as tf

    concurrent_batches = concurrent_batches_of(detect, gpu)
    intra = detect.intra_op_threads or (0 if gpu else max(1, available_cpus() // concurrent_batches))
    tf.config.threading.set_intra_op_parallelism_threads(intra)
    tf.config.threading.set_inter_op_parallelism_threads(0 if gpu else concurrent_batches)
