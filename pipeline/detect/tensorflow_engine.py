"""An engine over TensorFlow: a SavedModel as one function of uint8 images, whose weights are constants."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import tensorflow_setup
from pipeline.detect.engine import ModelFailed, OpenedModel, OutOfMemory
from pipeline.detect.saved_model import FrozenModel, frozen_model
from pipeline.detect.warmup_requests import read_requests
from pipeline.errors import ModelError

if TYPE_CHECKING:
    from tensorflow.errors import OpError

_CPU_BATCH_SIZES = (1, 2, 4)  # on a CPU larger batches gain nothing, and each image waits for the whole batch
_GPU_BATCH_SIZES = (1, 2, 4, 8, 16, 32)


class TensorFlowEngine:
    """A function of TensorFlow; an `Engine`.

    Args:
      frozen: The model.
      batch_sizes: Allowed batch sizes, ascending.
      concurrent_batches: Concurrent batches.
    """

    def __init__(self, frozen: FrozenModel, batch_sizes: tuple[int, ...], concurrent_batches: int):
        self.batch_sizes, self.concurrent_batches = batch_sizes, concurrent_batches
        self._function, self._roles = frozen.function, frozen.roles

    def run(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """Runs a batch; see `Engine`."""
        import tensorflow as tf

        try:
            outputs = self._function(tf.constant(pixels))
            return {role: tensor.numpy() for role, tensor in zip(self._roles, outputs, strict=True)}
        except tf.errors.ResourceExhaustedError as err:
            raise OutOfMemory(_reason(err)) from err
        except tf.errors.OpError as err:
            raise ModelFailed(_reason(err)) from err

    def close(self) -> None:
        """Frees memory; no run may be under way."""
        del self._function


def open_model(local: str, folder: str, model: ModelConfig, detect: DetectConfig) -> OpenedModel:
    """Opens a SavedModel; see `ENGINES`.

    Raises:
      ModelError: TensorFlow cannot load it, or it is no detector that is recognised.
    """
    if detect.precision == "int8":
        raise ModelError("precision int8: expected --engine openvino, got tensorflow")
    gpu = tensorflow_setup.configure_tensorflow(detect).config.get_visible_devices("GPU")
    frozen = frozen_model(local, folder, model, detect)
    metadata = frozen.metadata
    requests = read_requests(local, folder, metadata)
    batch = frozen.batch or (1 if metadata.resize == "none" else None)  # images of different sizes make no batch
    batch_sizes = (batch,) if batch else detect.batch_sizes or (_GPU_BATCH_SIZES if gpu else _CPU_BATCH_SIZES)
    engine = TensorFlowEngine(frozen, batch_sizes, tensorflow_setup.concurrent_batches_of(detect, bool(gpu)))
    return OpenedModel(engine, metadata, batch, frozen.has_boolean_mask, requests)


def _reason(err: OpError) -> str:
    """The last line of TensorFlow's message that is more than a node's name in brackets."""
    lines = [line.strip() for line in (err.message or "").splitlines()]
    return ([line for line in lines if line and not line.startswith("[[")] or [type(err).__name__])[-1][:300]
