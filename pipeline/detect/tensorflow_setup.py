"""TensorFlow in this process: import, threads, device, memory. The first model's settings hold for the life of the process."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.base.quiet import gc_paused, quiet_stderr
from pipeline.config import DetectConfig
from pipeline.config.engines import lacks_precision
from pipeline.detect.engine import concurrent_batches_of
from pipeline.detect.gpus import free_bytes, gpu_kind, take_gpu
from pipeline.detect.process_memory import freeze_gc
from pipeline.detect.tensorflow_internals import import_without_keras
from pipeline.detect.user_cache import cache_folder, keep_newest
from pipeline.errors import ModelError
from pipeline.limits import available_cpus, nvidia_gpus, resident_bytes

# the precision beside float32, and Grappler's option for it, which does nothing on the other device
_REWRITES = {"cpu": ("bfloat16", "auto_mixed_precision_onednn_bfloat16"), "gpu": ("float16", "auto_mixed_precision")}

_XLA_FLAGS, _XLA_CACHE = "TF_XLA_FLAGS", "--tf_xla_persistent_cache_directory="
_KEPT_FOLDERS, _KEPT_FILES = 4, 64  # newest ones; a file holds what XLA has compiled of a model for one batch size


def configure_tensorflow(detect: DetectConfig) -> Any:
    """Imports TensorFlow with the threads, device and memory of the settings; later calls change nothing.

    Raises:
      ModelError: The machine lacks the device, or the device the precision.
    """
    if "tensorflow" not in sys.modules and detect.device != "cpu" and detect.compiled != "no" and nvidia_gpus():
        _keep_what_xla_compiles()
    with quiet_stderr(), gc_paused():
        tf = import_without_keras()
    freeze_gc()
    gpu = _chosen_gpu(detect.device, tf.config.list_physical_devices("GPU"))
    if why := lacks_precision("tensorflow", detect.precision, gpu=gpu is not None):
        raise ModelError(why)
    other, rewrite = _REWRITES["cpu" if gpu is None else "gpu"]
    # of functions that are traced from now on
    tf.config.optimizer.set_experimental_options({rewrite: detect.precision == other})
    with contextlib.suppress(RuntimeError):  # TensorFlow has started already
        tf.config.set_visible_devices([] if gpu is None else [gpu], "GPU")
        if gpu is not None and detect.gpu_memory_mb:
            part = tf.config.LogicalDeviceConfiguration(memory_limit=detect.gpu_memory_mb)
            tf.config.set_logical_device_configuration(gpu, [part])
        elif gpu is not None:
            tf.config.experimental.set_memory_growth(gpu, True)
        concurrent_batches = concurrent_batches_of(detect, gpu is not None)
        by_default = 0 if gpu is not None else max(1, available_cpus() // concurrent_batches)
        tf.config.threading.set_intra_op_parallelism_threads(detect.intra_op_threads or by_default)
        tf.config.threading.set_inter_op_parallelism_threads(0 if gpu is not None else concurrent_batches)
    return tf


def _keep_what_xla_compiles() -> None:
    """Lets XLA keep what it compiles, in a folder of the user's cache for this GPU, its driver, TensorFlow and CUDA.

    XLA itself does not tell these apart. TensorFlow reads the flag when it is imported.
    """
    if _XLA_CACHE in os.environ.get(_XLA_FLAGS, "") or not (kind := gpu_kind()):
        return
    of_gpus = [each for each in importlib.metadata.distributions() if each.name.startswith(("tensorflow", "nvidia"))]
    versions = sorted(f"{each.name} {each.version}" for each in of_gpus)
    place = os.path.join(cache_folder(), "xla")
    folder = os.path.join(place, hashlib.sha256(f"{kind} {versions}".encode()).hexdigest()[:32])
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        os.utime(folder)  # it is in use
        with tempfile.TemporaryFile(dir=folder):  # where XLA cannot write, it would not compile
            pass
        keep_newest(place, "*", _KEPT_FOLDERS)
        keep_newest(folder, "*", _KEPT_FILES)
        os.environ[_XLA_FLAGS] = f"{os.environ.get(_XLA_FLAGS, '')} {_XLA_CACHE}{folder}".strip()


@contextlib.contextmanager
def xla_cache_set_aside() -> Iterator[bool]:
    """Takes the files out of XLA's cache, so that it compiles anew; if that raises, too, they were sound, and come back.

    Yields whether there are any, in a cache that lies in the user's.
    """
    folder = os.environ.get(_XLA_FLAGS, "").partition(_XLA_CACHE)[2].partition(" ")[0]
    if not folder.startswith(os.path.join(cache_folder(), "")):
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="aside-", dir=os.path.dirname(folder), ignore_cleanup_errors=True) as aside:
        _move_files(folder, aside)
        try:
            yield bool(os.listdir(aside))
        except BaseException:
            _move_files(aside, folder)
            raise


def _move_files(source: str, target: str) -> None:
    for file in Path(source).glob("*"):
        with contextlib.suppress(OSError):  # another process may have taken it
            file.replace(Path(target, file.name))


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
    """GPU memory that TensorFlow may use: its limit, else what it has taken and what no process has.

    None on a CPU, or where NVIDIA's driver does not tell.
    """
    if not uses_gpu():
        return None
    if detect.gpu_memory_mb:
        return detect.gpu_memory_mb * 1_048_576
    import tensorflow as tf

    number = int(tf.config.get_visible_devices("GPU")[0].name.rpartition(":")[2])
    free = free_bytes(number, len(tf.config.list_physical_devices("GPU")))
    return None if free is None else memory_in_use() + free


def _chosen_gpu(device: str, gpus: list[Any]) -> Any | None:
    """The GPU for `auto`, `cpu`, `gpu` or `gpu:<number>` (without a number one that few processes use); None for the CPU."""
    if device == "cpu":
        return None
    index = take_gpu(len(gpus), device)
    if device.startswith("gpu") and len(gpus) <= index:
        raise ModelError(f"device {device}: TensorFlow sees {len(gpus)} GPUs; use --device cpu or auto")
    return gpus[index] if index < len(gpus) else None
