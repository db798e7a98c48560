"""An engine over TensorFlow's batch scheduler: smaller batches after out-of-memory errors, and retries image by image."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pipeline.detect.loaded_model import ModelFailed, OutOfMemory, Output
from pipeline.detect.tensorflow_scheduler import Predict, TensorFlowScheduler

_PAUSE_SECONDS = 0.3  # at least, between first calls: images of the model in use go first


class BatchedModel:
    """A model behind a scheduler; an `Engine`.

    After an out-of-memory error the engine drops the largest batch size for good and retries the images in smaller batches. After
    any other error it retries image by image, so that one image fails no other.

    Args:
      predict: The model.
      input_hw: Height and width of its input.
      batch_sizes: Allowed batch sizes, ascending.
      concurrent_batches: Concurrent batches.
      timeout_ms: Longest time that an image waits for others.

    Attributes:
      gpu_bytes: GPU memory that TensorFlow may use; None on a CPU.
    """

    def __init__(
        self, predict: Predict, input_hw: tuple[int, int], batch_sizes: Sequence[int], concurrent_batches: int, timeout_ms: float
    ):
        self._scheduler = TensorFlowScheduler(predict, input_hw, batch_sizes, concurrent_batches, timeout_ms)
        self.gpu_bytes = self._scheduler.gpu_bytes
        self._input_hw = input_hw
        self._concurrent_batches = concurrent_batches
        self._lock = threading.Lock()  # guards the list of batch sizes
        self._batch_sizes = tuple(batch_sizes)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Allowed batch sizes; fewer after an out-of-memory error."""
        return self._batch_sizes

    @property
    def images_in_flight(self) -> int:
        """Images that fill all concurrent batches twice, so that the next batch always waits."""
        return 2 * self._concurrent_batches * self._batch_sizes[-1]

    def __call__(self, images: Sequence[np.ndarray]) -> list[Output | ModelFailed]:
        """Runs images, batched with those of other threads; see `Engine`."""
        while len(images):
            largest = self._batch_sizes[-1]
            try:
                return [*self._scheduler.run(images, largest)]
            except OutOfMemory:
                if not self._drop_rung(largest):
                    raise
            except ModelFailed:
                return [self._alone(pixels) for pixels in images]
        return []

    def warm_up(self, *, at_once: bool = True) -> None:
        """Runs every batch size once, so that no image pays for a first call.

        Args:
          at_once: Also runs concurrent batches of the largest size, which takes all cores, to allocate the memory that they need.
            Else another model is in use: pauses before each call, so that its images go first.

        Raises:
          OutOfMemory: Memory does not suffice for a single image.
          ModelFailed: The model fails on blank images.
        """
        blank = np.zeros((*self._input_hw, 3), np.uint8)
        took = 0.0
        for size in self._batch_sizes:
            if size <= self._batch_sizes[-1]:  # an out-of-memory error may have dropped it
                time.sleep(0.0 if at_once else max(took, _PAUSE_SECONDS))
                began = time.monotonic()
                self._run_blank([blank] * size)
                took = time.monotonic() - began
        if not at_once:
            return
        with ThreadPoolExecutor(self._concurrent_batches) as concurrent_batches:
            list(concurrent_batches.map(self._run_blank, [[blank] * self._batch_sizes[-1]] * self._concurrent_batches))

    def close(self) -> None:
        """Frees memory and threads; no call may be under way."""
        self._scheduler.close()

    def _run_blank(self, images: list[np.ndarray]) -> None:
        for output in self(images):
            if isinstance(output, ModelFailed):
                raise output

    def _alone(self, pixels: np.ndarray) -> Output | ModelFailed:
        try:
            return self._scheduler.run_alone(pixels)
        except ModelFailed as err:
            return err

    def _drop_rung(self, largest: int) -> bool:
        """Drops the largest batch size, unless another thread already has; False if it is the only one."""
        with self._lock:
            if self._batch_sizes[-1] == largest:
                if len(self._batch_sizes) == 1:
                    return False
                self._batch_sizes = self._batch_sizes[:-1]
            return True
