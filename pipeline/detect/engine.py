"""Interface of an engine, which runs a model: TensorFlow, another library, or a client of a server.

An engine only runs batches. One `Batcher` for all engines makes the batches, retries and warms up. Another engine is a module
with a function `open_model`, and a row in `pipeline.config.engines`, which says what it can do;
`--engine package.module:function` takes such a function from anywhere.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from models.base.project import pip_install
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.config.engines import ENGINES
from pipeline.config.setting import is_own_engine
from pipeline.errors import ModelError
from pipeline.limits import available_cpus

_CPU_BATCH_SIZES = (1, 2, 4)  # on a CPU larger batches gain nothing, and each image waits for the whole batch
_GPU_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
COMPILED_SIZES = (1, 8, 32)  # each takes XLA 6 to 18 s, and TensorRT builds an engine anew for one that is larger


class OutOfMemory(Exception):  # noqa: N818  named like `StopIteration`
    """A batch does not fit into the memory of its device; a smaller one may."""


class NoMemoryNow(OutOfMemory):
    """A server has no memory for a batch at this moment, and may have some for as large a one later."""


class ModelFailed(Exception):  # noqa: N818
    """The model, or its device, fails on these images; the text is the reason, in one line. The batcher finds out which."""


class ImagesRefused(ModelFailed):
    """A server does not take such images, or answers them otherwise than it describes, and will always do so."""


class BadOutput(ModelFailed):
    """What the model returns for these images cannot be detections."""


class Engine(Protocol):
    """Runs a model; thread-safe.

    Attributes:
      batch_sizes: Allowed batch sizes, ascending; `(1,)` for one image at a time.
      concurrent_batches: How many runs at once keep the device busy.

    `run_all_boxes`, if it has it, is `run` with all that the model answers, also where `run` answers candidates. It shows whether
    the model mixes the images of a batch, which no candidate may show.
    """

    batch_sizes: tuple[int, ...]
    concurrent_batches: int

    def run(self, pixels: np.ndarray) -> Mapping[str, np.ndarray]:
        """Runs the model on a batch.

        Args:
          pixels: `(n, H, W, 3) uint8`, n one of `batch_sizes`, H and W the input size in the metadata.

        Returns:
          For each image its candidates: `boxes (n, K, 4)`, `scores (n, K)`, `classes (n, K)` and `count (n,)`, how many of the K
          boxes an image has, in the order of the model's boxes. Or all that a model answers: `boxes (n, M, 4)`, `scores (n, M)`
          or `(n, M, C)`, and where it has them `classes (n, M)` and `count (n,)`.

        Raises:
          OutOfMemory: The batch does not fit into memory.
          ModelFailed: The model fails on this batch.
        """

    def close(self) -> None:
        """Frees memory and threads. No run may be under way, and none may follow."""


class FunctionEngine:
    """An `Engine` of a function.

    Args:
      run: Of `Engine`; raises its errors.
      detect: Batch sizes and concurrent batches.
      batch: Images of each run, of a model of a fixed batch; None for any number.
      gpu: Whether it runs on a GPU.
      sizes: Batch sizes, unless the settings have some; default: as the device is.
      close: Frees what is not freed with the function.
      recovers_s: How long a device that fails on everything may take to work again; a server may be started anew.
      run_all_boxes: Of `Engine`, where `run` answers candidates.
    """

    def __init__(
        self,
        run: Callable[[np.ndarray], Mapping[str, np.ndarray]],
        detect: DetectConfig,
        batch: int | None = None,
        *,
        gpu: bool = False,
        sizes: Sequence[int] = (),
        close: Callable[[], None] = lambda: None,
        recovers_s: float = 0.0,
        run_all_boxes: Callable[[np.ndarray], Mapping[str, np.ndarray]] | None = None,
    ):
        self.run_all_boxes = run_all_boxes or run
        self.run, self._close, self.gpu, self.recovers_s = run, close, gpu, recovers_s
        by_default = tuple(sizes) or (_GPU_BATCH_SIZES if gpu else _CPU_BATCH_SIZES)
        self.batch_sizes: tuple[int, ...] = (batch,) if batch else detect.batch_sizes or by_default
        self.concurrent_batches = concurrent_batches_of(detect, gpu)

    def close(self) -> None:
        """Frees the function; no run may be under way."""
        self._close()
        del self.run, self.run_all_boxes


def concurrent_batches_of(detect: DetectConfig, gpu: bool) -> int:
    """Concurrent batches: as set, else three on a GPU, and one more than cores on a CPU, up to four.

    On a GPU one is copied, one computes, and the boxes of one are read.
    """
    return detect.concurrent_batches or (3 if gpu else min(4, available_cpus() + 1))


class OpenedModel(NamedTuple):
    """A model as an engine opens it.

    Attributes:
      engine: Runs it.
      metadata: What it expects and returns; a combined output, logits and a grid are split, activated and decoded by the engine.
      mixes: Whether it is known to mix the images of a batch.
      warmup_requests: Encoded images, or arrays `(n, H, W, 3) uint8`, on which it must not fail before it is used.
      version: Of a server's model.
      notes: What a person should know of how it runs, a line each.
    """

    engine: Engine
    metadata: DetectorMetadata
    mixes: bool = False
    warmup_requests: tuple[bytes | np.ndarray, ...] = ()
    version: str = ""
    notes: tuple[str, ...] = ()


OpenModel = Callable[[str, str, ModelConfig, DetectConfig], OpenedModel]
"""Opens a model: its files on this machine (empty for a server's), its path for messages, its description, how to run it.

An engine of the user's own gets `--model` as it is given: any file, folder, name, or nothing.
"""


def opener_of(engine: str) -> OpenModel:
    """The function that opens a model for an engine; a module of the user's own may lie in the current folder.

    Raises:
      ModelError: There is no such function.
    """
    if is_own_engine(engine) and not {"", os.getcwd()} & {*sys.path}:  # as of the console command
        sys.path.append(os.getcwd())  # last, so that nothing there hides an installed package
    try:
        found: OpenModel = pkgutil.resolve_name(ENGINES[engine].opener if engine in ENGINES else engine)
    except (ImportError, AttributeError, ValueError) as err:
        raise ModelError(f"engine {engine}: expected {', '.join(ENGINES)} or package.module:function, but: {err}") from err
    return found


def check_installed(engine: str, needed_by: str = "") -> None:
    """Raises ModelError if the package of an engine is missing; default: the engine needs it."""
    kind = ENGINES[engine]
    if not importlib.util.find_spec(kind.package):
        more = f" (on a GPU: {kind.on_gpu})" if kind.on_gpu else ""
        extra = f"{pip_install(kind.extra)}{more}"
        raise ModelError(f"{needed_by or f'engine {engine}'} needs {kind.package}; install the extra: {extra}")


def check_package(package: str, needed_by: str) -> None:
    """Raises ModelError if a package beside an engine's own is missing; its extra could replace the engine's by that for CPUs."""
    if not importlib.util.find_spec(package):
        name = package.replace("_", "-")
        raise ModelError(f"{needed_by} needs {name}: pip install {name}")
