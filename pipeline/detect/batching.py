"""An engine over TensorFlow's batch scheduler: smaller batches after out-of-memory errors, and retries image by image."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pipeline.detect.loaded_model import ModelFailed, OutOfMemory, Output
from pipeline.detect.tensorflow_scheduler import InputHw, Predict, TensorFlowScheduler

_ANY_SIDE = 640  # of blank images for a model of any input size
_PAUSE_SECONDS = 0.3  # at least, between first calls: images of the model in use go first


class BatchedModel:
    """A model behind a scheduler; an `Engine`.

    After an out-of-memory error the engine drops the largest batch size for good and retries the images in smaller batches. After
    any other error it retries image by image, so that one image fails no other.

    Args:
      predict: The model.
      input_hw: Height and width of its input; without them, each image is a batch of its own.
      batch_sizes: Allowed batch sizes, ascending.
      concurrent_batches: Concurrent batches.
      timeout_ms: Longest time that an image waits for others.
      alone: Whether each image shares its batch, of the smallest size, with copies of itself only.

    Attributes:
      gpu_bytes: GPU memory that TensorFlow may use; None on a CPU.
    """

    def __init__(
        self,
        predict: Predict,
        input_hw: InputHw,
        batch_sizes: Sequence[int],
        concurrent_batches: int,
        timeout_ms: float,
        *,
        alone: bool = False,
    ):
        self._always_alone = alone
        self._scheduler = TensorFlowScheduler(predict, input_hw, batch_sizes, concurrent_batches, timeout_ms)
        self.gpu_bytes = self._scheduler.gpu_bytes
        self._input_hw = (input_hw[0] or _ANY_SIDE, input_hw[1] or _ANY_SIDE)
        self._any_size = None in input_hw
        self._concurrent_batches = concurrent_batches
        self._lock = threading.Lock()  # guards the list of batch sizes
        self._batch_sizes = tuple(batch_sizes)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Allowed batch sizes; fewer after an out-of-memory error."""
        return self._batch_sizes

    @property
    def images_in_flight(self) -> int:
        """Images that fill all concurrent batches twice, so that the next batch always waits; one waits if they may be large."""
        return self._concurrent_batches + 1 if self._any_size else 2 * self._concurrent_batches * self._batch_sizes[-1]

    def __call__(self, images: Sequence[np.ndarray]) -> list[Output | ModelFailed]:
        """Runs images, batched with those of other threads; see `Engine`."""
        if self._always_alone:
            return [self._alone(pixels) for pixels in images]
        if self._any_size and len(images) > 1:
            return [output for pixels in images for output in self([pixels])]
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

    def mixes_images(self) -> bool:
        """Whether the output for an image depends on the other images of its batch, or a batch fails where one image does not.

        It compares two images beside each other with each beside its copy, in batches of one size: between sizes, the last digits
        differ. A difference counts only if the same batch gives the same output again.
        """
        draw = np.random.default_rng(0)
        pair = [draw.integers(0, high, (*self._input_hw, 3), np.uint8) for high in (255, 128)]
        size = self._batch_sizes[-1]
        try:
            mixed = self._scheduler.run(pair, size)
            for n, image in enumerate(pair):
                alone = self._scheduler.run([image, image], size)[n]
                if not _alike(mixed[n], alone) and _alike(alone, self._scheduler.run([image, image], size)[n]):
                    return True
        except ModelFailed:
            return True
        return False

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


def _alike(a: Output, b: Output) -> bool:
    return all(
        value.shape == b.arrays[name].shape and np.allclose(value, b.arrays[name], rtol=1e-2, atol=1e-3, equal_nan=True)
        for name, value in a.arrays.items()
    )
