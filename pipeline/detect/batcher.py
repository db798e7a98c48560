"""The batcher in front of every engine: merges the images of all threads into batches, and retries what fails.

    run(images) -> queue -> a thread takes a batch when enough images wait, or the oldest has waited long enough
                              -> pads it to an allowed size -> engine -> each caller gets its part of the outputs

A batch that runs out of memory is divided, and its size is not used again. A batch that fails is repeated image by image, so that
one image fails no other. After an image that fails alone comes a blank one. If that fails too, the device is to blame: all images
of the batch fail with it, and those that come later no longer wait for it until it has run something.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipeline.detect.engine import BadOutput, Engine, ModelFailed, NoMemoryNow, OutOfMemory
from pipeline.detect.process_memory import trim_memory
from pipeline.errors import DeviceFailedError
from pipeline.log_lines import console
from pipeline.process import PROCESS

_ANY_SIDE = 640  # of blank images for a model of any input size
_PAUSE_SECONDS = 0.3  # at least, between first calls: images of the model in use go first
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0  # between blank images for a device that may come back


@dataclasses.dataclass(frozen=True, slots=True)
class Outputs:
    """The model's outputs for some images of a request, or its failure on one.

    Attributes:
      start: The first of these images in the request.
      stop: Behind the last one.
      arrays: As of `Engine.run`, for these images.
      error: Why this one image fails, where a blank one does not: `ModelFailed`, or `OutOfMemory`; `arrays` is then empty.
      batch_size: Size of the batch, with padding, if these images are its first ones, else 0; so a sum counts each batch once.
      seconds: Time of the batch where `batch_size` is given, else 0.
    """

    start: int
    stop: int
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    error: BaseException | None = None
    batch_size: int = 0
    seconds: float = 0.0


class Batcher:
    """Batches for one engine; thread-safe.

    Args:
      engine: Runs the model; the batcher closes it.
      input_hw: Height and width of the model's input; without them each image is a batch of its own.
      timeout_ms: Longest time that an image waits for others.
      check: Raises `ModelFailed` where the outputs for so many images are none.
    """

    def __init__(
        self,
        engine: Engine,
        input_hw: tuple[int | None, int | None],
        timeout_ms: float = 1.0,
        check: Callable[[Mapping[str, np.ndarray], int], object] = lambda outputs, images: None,
    ):
        self.engine, self._check = engine, check
        self._input_hw = (input_hw[0] or _ANY_SIDE, input_hw[1] or _ANY_SIDE)
        self._timeout_s = timeout_ms / 1e3
        self._sizes = tuple(engine.batch_sizes)
        self._alone = None in input_hw
        self._changed = threading.Condition()  # guards what follows
        self._waiting: deque[_Part] = deque()
        self._images = 0  # that wait
        self._closed = False
        self._has_failed = False  # the device, for longer than it may take to work again
        self._threads = [
            threading.Thread(target=self._work, name=f"batch {n}", daemon=True) for n in range(engine.concurrent_batches)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Allowed batch sizes; fewer after an out-of-memory error."""
        return self._sizes[:1] if self._alone else self._sizes

    @property
    def has_shrunk(self) -> bool:
        """Whether memory did not suffice for the largest batches."""
        return self._sizes != tuple(self.engine.batch_sizes)

    @property
    def images_in_flight(self) -> int:
        """Images that fill all concurrent batches twice, so that the next batch always waits; one waits if each is a batch."""
        return len(self._threads) + 1 if self._alone else 2 * len(self._threads) * self._sizes[-1]

    def run(self, pixels: np.ndarray) -> list[Outputs]:
        """Blocks until the outputs of all images have come.

        Args:
          pixels: `(n, H, W, 3) uint8`, any n. As many as the largest batch go to the engine as they are, without a copy.

        Returns:
          The outputs, by ascending `start`, without a gap.

        Raises:
          DeviceFailedError: The device fails on a blank image, too.
        """
        answers: queue.SimpleQueue[Outputs] = queue.SimpleQueue()
        if len(pixels):
            with self._changed:
                self._waiting.append(_Part(pixels, 0, len(pixels), time.monotonic(), answers))
                self._images += len(pixels)
                self._changed.notify()
        found: list[Outputs] = []
        images = 0
        while images < len(pixels):  # also after an error: until then the engine may read the pixels
            found.append(answers.get())
            images += found[-1].stop - found[-1].start
        for answer in found:
            if answer.error and not isinstance(answer.error, ModelFailed | OutOfMemory):
                raise answer.error
        return sorted(found, key=lambda part: part.start)

    def isolate(self) -> None:
        """From now on each image is a batch of its own, filled with copies of itself; for a model that mixes images."""
        self._alone = True

    def warm_up(self, *, at_once: bool = True) -> None:
        """Runs every batch size once, so that no image pays for a first call.

        Args:
          at_once: Also runs concurrent batches of the largest size, which takes all cores, to allocate the memory that they need.
            Else another model is in use: pauses before each call, so that its images go first.

        Raises:
          DeviceFailedError: The model fails on a blank image; its cause is what the engine raised.
        """
        took = 0.0
        for size in self.batch_sizes:
            if size <= self.batch_sizes[-1]:  # an out-of-memory error may have dropped it
                time.sleep(0.0 if at_once else max(took, _PAUSE_SECONDS))
                began = time.monotonic()
                self._run_blank(size)
                took = time.monotonic() - began
        if at_once:
            self._run_blank(self.batch_sizes[-1], len(self._threads))

    def mixes_images(self) -> bool:
        """Whether the output for an image depends on the other images of its batch, or a batch fails where one image does not.

        False, too, on a device that fails on everything, which tells nothing of the model.

        It compares two images beside each other with each beside its copy, in batches of one size: between sizes, the last digits
        differ. A difference counts only if the same batch gives the same output again. All boxes are compared: noise may have no
        candidates. Batch sizes for which memory does not suffice are dropped.
        """
        if self.batch_sizes[-1] == 1:
            return False
        draw = np.random.default_rng(0)
        pair = np.stack([draw.integers(0, high, (*self._input_hw, 3), np.uint8) for high in (255, 128)])
        try:
            mixed = self._filled_batch(pair)
            for n in range(2):
                alone = self._filled_batch(pair[[n, n]])
                if not _alike(mixed, alone, n) and _alike(alone, self._filled_batch(pair[[n, n]]), n):
                    return True
        except OutOfMemory:
            return self._drop_sizes_from(self._sizes[-1]) and self.mixes_images()
        except ModelFailed:
            with contextlib.suppress(ModelFailed, OutOfMemory):
                self._run_engine(_padded(pair[:1], self._sizes[0]))
                return True
        return False

    def close(self) -> None:
        """Closes the engine, and frees memory and threads; no call may be under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self.engine.close()
        trim_memory(collect_garbage=True)

    def _run_blank(self, size: int, batches: int = 1) -> None:
        images = batches * (1 if self._alone else size)
        for output in self.run(np.zeros((images, *self._input_hw, 3), np.uint8)):
            if output.error:  # the device has failed for a moment only
                raise output.error

    def _filled_batch(self, pixels: np.ndarray) -> Mapping[str, np.ndarray]:
        run = getattr(self.engine, "run_all_boxes", self.engine.run)
        return self._run_engine(_padded(pixels, self._sizes[-1]), run)

    def _work(self) -> None:
        while self._take_and_run():
            pass

    def _take_and_run(self) -> bool:
        """Runs the next batch; False once the batcher is closed. Apart from the loop, so that no thread holds images at rest."""
        parts = self._next_batch()
        if parts:
            self._run_batch(parts)
        return bool(parts)

    def _next_batch(self) -> list[_Part]:
        """Waits for a batch; empty once the batcher is closed."""
        with self._changed:
            while not self._closed:
                most = 1 if self._alone else self._sizes[-1]
                wait_s = self._waiting[0].since + self._timeout_s - time.monotonic() if self._waiting else None
                if wait_s is not None and (self._images >= most or wait_s <= 0):
                    return self._take(most)
                self._changed.wait(wait_s)
            return []

    def _take(self, most: int) -> list[_Part]:
        taken = []
        while self._waiting and most:
            now, later = self._waiting.popleft().divided(most)
            taken.append(now)
            most -= now.images
            self._images -= now.images
            if later.images:
                self._waiting.appendleft(later)
        if self._waiting:
            self._changed.notify()
        return taken

    def _run_batch(self, parts: Sequence[_Part]) -> DeviceFailedError | None:
        """Runs one batch and answers the requests of its parts; never raises. Returns why the device fails, if it does."""
        count = sum(part.images for part in parts)
        size = next((size for size in self._sizes if size >= count), self._sizes[-1])
        try:
            if count > size:  # another thread has dropped the size for which it was taken
                return self._run_in_sizes(parts, size)
            self._answer(parts, size)
        except (OutOfMemory, ModelFailed) as err:
            if isinstance(err, OutOfMemory) and not isinstance(err, NoMemoryNow) and self._drop_sizes_from(size):
                return self._run_in_sizes(parts, self._sizes[-1])
            if count > 1:
                return self._run_in_sizes(parts, 1)
            return self._blame(parts, size)
        except BaseException as err:  # noqa: BLE001  whatever an engine raises is for those who wait
            _fail(parts, err)
        return None

    def _answer(self, parts: Sequence[_Part], size: int) -> None:
        """Runs one batch and answers the requests of its parts; raises what the engine raises."""
        began = time.monotonic()
        pixels = [part.pixels for part in parts]
        outputs = self._run_engine(_padded(pixels[0] if len(parts) == 1 else np.concatenate(pixels), size))
        seconds = time.monotonic() - began
        first = 0
        for part in parts:
            arrays = {name: array[first : first + part.images] for name, array in outputs.items()}
            led = (0, 0.0) if first else (size, seconds)
            part.answers.put(Outputs(part.start, part.stop, arrays, None, *led))
            first += part.images

    def _blame(self, parts: Sequence[_Part], size: int) -> DeviceFailedError | None:
        """As `_run_batch`, for one image that has failed alone: its outputs come if the device failed only then."""
        try:
            self._check_device(size)
            self._answer(parts, size)
        except BaseException as err:  # noqa: BLE001  of the image, where the device is sound
            _fail(parts, err)
            return err if isinstance(err, DeviceFailedError) else None
        return None

    def _check_device(self, size: int) -> None:
        """Runs a blank image, which every model in use can; waits for a device that may come back, as a server that fails may.

        Raises:
          DeviceFailedError: The blank image fails; the cause is what the engine raised.
          KeyboardInterrupt: The job was stopped.
        """
        wait_s, until, is_first = _FIRST_WAIT_S, time.monotonic() + getattr(self.engine, "recovers_s", 0.0), True
        while True:
            try:
                self._run_engine(np.zeros((size, *self._input_hw, 3), np.uint8))
            except (OutOfMemory, ModelFailed) as err:
                if self._has_failed or isinstance(err, BadOutput) or time.monotonic() >= until:
                    self._has_failed = True
                    raise DeviceFailedError(
                        f"the device failed, and no image is to blame: the model runs on no blank image either: {err}; "
                        "the same command does the rest, perhaps on another device"
                    ) from err
                if is_first:
                    console.info("waiting for the model, which fails on a blank image: %s", err)
            else:
                return
            PROCESS.check_stopped()
            PROCESS.parts["detector"].progressed()  # waiting is not being stuck
            time.sleep(wait_s)
            wait_s, is_first = min(2 * wait_s, _LONGEST_WAIT_S), False

    def _run_in_sizes(self, parts: Iterable[_Part], most: int) -> DeviceFailedError | None:
        failure = None
        for part in parts:
            while part.images and not failure:
                now, part = part.divided(most)  # noqa: PLW2901  what is left of it
                failure = self._run_batch([now])
            if failure and part.images:
                _fail([part], failure)
        return failure

    def _run_engine(
        self, pixels: np.ndarray, run: Callable[[np.ndarray], Mapping[str, np.ndarray]] | None = None
    ) -> Mapping[str, np.ndarray]:
        try:
            outputs = (run or self.engine.run)(pixels)
        except MemoryError as err:  # of NumPy
            raise OutOfMemory(str(err) or "this process has no memory") from None
        for name, array in outputs.items():
            if array.shape[:1] != (len(pixels),):
                raise ModelFailed(f"expected {name} of {len(pixels)} images from the model, got an array of shape {array.shape}")
        self._check(outputs, len(pixels))
        self._has_failed = False
        return outputs

    def _drop_sizes_from(self, size: int) -> bool:
        """Drops a batch size that needs too much memory, and larger ones; False if none is left."""
        with self._changed:
            left = tuple(one for one in self._sizes if one < size)
            self._sizes = left or self._sizes
        return bool(left)


class _Part(NamedTuple):
    """Some images of a request, `start` to `stop`, that have waited `since`, and the queue for what becomes of them."""

    request: np.ndarray
    start: int
    stop: int
    since: float
    answers: queue.SimpleQueue[Outputs]

    @property
    def images(self) -> int:
        return self.stop - self.start

    @property
    def pixels(self) -> np.ndarray:
        return self.request[self.start : self.stop]

    def divided(self, most: int) -> tuple[_Part, _Part]:
        """Its first images, at most `most`, and the others."""
        cut = min(self.stop, self.start + most)
        return self._replace(stop=cut), self._replace(start=cut)


def _fail(parts: Iterable[_Part], error: BaseException) -> None:
    for part in parts:
        part.answers.put(Outputs(part.start, part.stop, error=error))


def _padded(pixels: np.ndarray, size: int) -> np.ndarray:
    """The images, and copies of the last one up to `size`; the same array if none is missing."""
    missing = size - len(pixels)
    return np.concatenate([pixels, np.repeat(pixels[-1:], missing, axis=0)]) if missing else pixels


def _alike(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], n: int) -> bool:
    """Whether two batches have the same answer for image n; behind its `count` there is nothing."""
    return all(
        _counted(a, name, n).shape == _counted(b, name, n).shape
        and np.allclose(_counted(a, name, n), _counted(b, name, n), rtol=1e-2, atol=1e-3, equal_nan=True)
        for name in a
    )


def _counted(outputs: Mapping[str, np.ndarray], name: str, n: int) -> np.ndarray:
    of_image: np.ndarray = outputs[name][n]
    count = outputs.get("count")
    if count is None or not of_image.ndim or not np.isfinite(count[n]).all() or np.size(count[n]) != 1:
        return of_image
    return of_image[: max(0, int(np.ravel(count[n])[0]))]
