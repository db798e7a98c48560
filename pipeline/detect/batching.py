"""An engine over any scheduler of model calls: what makes them smaller, and what keeps an image that fails to itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from pipeline.detect.loaded_model import ModelFailed, OutOfMemory, Output

_PAUSE_SECONDS = 0.3  # at least, between first calls: who waited meanwhile has had its turn then


class Scheduler(Protocol):
    """Merges the images of all threads that call it at the same time into model calls."""

    def run(self, images: Sequence[np.ndarray], largest: int) -> list[Output]:
        """Blocks until the outputs of a few images are there.

        Args:
          images: Each `(H, W, 3) uint8`; several calls' worth of them are divided.
          largest: Rung of the largest model call.

        Raises:
          OutOfMemory: A model call that held one of them does not fit into memory.
          ModelFailed: The model fails on a call that held one of them.
        """

    def run_alone(self, pixels: np.ndarray) -> Output:
        """As `run`, for one image that shares its model call with no other; it may take longer."""

    def close(self) -> None:
        """Gives back memory and threads; nothing may be under way."""


class BatchedModel:
    """A model behind a scheduler; an `Engine`.

    Out of memory: the largest batch size is dropped for good, and the images of the failed call are tried again in smaller ones.
    Any other failure of a call is tried again image by image, so that an image that breaks the model breaks no other.

    Args:
      scheduler: Runs the model; closed with this.
      input_hw: Height and width of the input.
      batch_sizes: The batch sizes, ascending.
      concurrent_batches: Model calls in flight.
    """

    def __init__(self, scheduler: Scheduler, input_hw: tuple[int, int], batch_sizes: Sequence[int], concurrent_batches: int):
        self._scheduler = scheduler
        self._input_hw = input_hw
        self._concurrent_batches = concurrent_batches
        self._lock = threading.Lock()  # of the batch sizes, while it is made shorter
        self._batch_sizes = tuple(batch_sizes)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The allowed batch sizes as they are now; shorter than at first after an out-of-memory."""
        return self._batch_sizes

    @property
    def images_in_flight(self) -> int:
        """How many images keep every stream busy with the next batch already waiting."""
        return 2 * self._concurrent_batches * self._batch_sizes[-1]

    def __call__(self, images: Sequence[np.ndarray]) -> list[Output | ModelFailed]:
        """Runs images in whatever model calls they end up; see `Engine`."""
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
        """Runs every batch size, and the largest on all concurrent batches at once, so that no image pays for a first call.

        Args:
          at_once: Whether the latter; that takes all cores, and is for the memory that so many calls need. Else another model is
            at work meanwhile, whose images come first: there is a pause before each call.

        Raises:
          OutOfMemory: Memory does not suffice for a single image.
          ModelFailed: The model fails on blank images.
        """
        blank = np.zeros((*self._input_hw, 3), np.uint8)
        took = 0.0
        for size in self._batch_sizes:
            if size <= self._batch_sizes[-1]:  # else dropped meanwhile
                time.sleep(0.0 if at_once else max(took, _PAUSE_SECONDS))
                began = time.monotonic()
                self._run_blank([blank] * size)
                took = time.monotonic() - began
        if not at_once:
            return
        with ThreadPoolExecutor(self._concurrent_batches) as concurrent_batches:
            list(concurrent_batches.map(self._run_blank, [[blank] * self._batch_sizes[-1]] * self._concurrent_batches))

    def close(self) -> None:
        """Gives back memory and threads; nothing may be under way."""
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
        """Shortens the batch sizes unless another caller has done so already; False when one batch size is left."""
        with self._lock:
            if self._batch_sizes[-1] == largest:
                if len(self._batch_sizes) == 1:
                    return False
                self._batch_sizes = self._batch_sizes[:-1]
            return True
