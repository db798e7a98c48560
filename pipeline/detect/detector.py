"""Thread pool over a shared model: encoded images in, one `DetectedImage` or `DeadLetter` out for each.

    start(image) -> waiting images -> a thread of the pool takes a few:
        decode -> fit to the model's input -> engine(pixels), which batches over threads -> map boxes back -> result

The pool has enough threads that the next images always wait at the model. A semaphore keeps decoding to as many cores as the
settings allow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np

from models.geometry import InputTransform, fit_image, resize_plan
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.detect.batcher import Output
from pipeline.detect.canary import Canary
from pipeline.detect.check_model import check
from pipeline.detect.decode import DecodedImage, decode_image
from pipeline.detect.detections import to_detections
from pipeline.detect.engine import ModelFailed
from pipeline.detect.headers.header import Size
from pipeline.detect.loaded_model import LoadedModel
from pipeline.detect.model_in_use import ModelInUse
from pipeline.detect.thumbnails import make_thumbnail, thumbnail_of
from pipeline.failures import ImageError
from pipeline.limits import available_cpus
from pipeline.prefetch import started_pool
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, Timing
from pipeline.results.cancellation import until_cancelled
from pipeline.stats.canary import CanaryStats
from pipeline.stats.process import PROCESS
from pipeline.stats.samples import Sampler

_TOGETHER = 4  # each call of the model costs it half a millisecond


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared:
    """A decoded image, fitted to the model's input; its full-sized pixels are freed."""

    image: EncodedImage
    received_at: float
    image_wh: Size
    transform: InputTransform
    pixels: np.ndarray
    decode_seconds: float
    fitted_at: float
    thumbnail: bytes  # of an image that is likely to be wanted as a sample


class Fitted(NamedTuple):
    """A decoded image, its transform into the model's input, and its pixels there, `(H, W, 3) uint8`."""

    decoded: DecodedImage
    transform: InputTransform
    pixels: np.ndarray


class VersionWatch(Protocol):
    """Replaces the detector's model version while a job runs."""

    def take_counts(self) -> Counter[str]:
        """`swaps` and `refusals` since the last call."""

    def close(self) -> None:
        """Stops the watch."""


class Detector:
    """Detects in images with a loaded model; thread-safe.

    Args:
      model: The model; the detector closes it.
      detect: How to run the model.
      samples: How many samples the job wants; images that may be among them get a thumbnail.

    Attributes:
      in_use: The model version in use; swaps it.
      watched: Looks for other versions; None where the version is fixed.
      canary: The version that also gets a fraction of the images; None where there is none.
      no_canary: The version labelled canary and why it gets no images; None where no version has the label, or the canary runs.
      ready_at: When the detector became usable, seconds since the epoch.
    """

    def __init__(self, model: LoadedModel, detect: DetectConfig, samples: int = 0):
        self.in_use = ModelInUse(model)
        self.watched: VersionWatch | None = None
        self.canary: Canary | None = None
        self.no_canary: CanaryStats | None = None
        self._former_canary: Canary | None = None
        self._settings = detect
        self._decoders = detect.decode_threads or available_cpus()
        self._decoding = threading.BoundedSemaphore(self._decoders)
        self._sampler, self._has_samples = Sampler(samples), samples > 0
        self._waiting: deque[tuple[EncodedImage, Future[DetectedImage | DeadLetter]]] = deque()
        self._submitting = threading.Lock()
        self._threads = self._threads_for(model)
        self._pool = started_pool(self._threads, "detect")
        self.ready_at = time.time()

    @property
    def model(self) -> LoadedModel:
        """The model version in use."""
        return self.in_use.current

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Allowed batch sizes, ascending."""
        return self.model.engine.batch_sizes

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of how the model runs."""
        return self.model.notes

    def check(self, model: LoadedModel) -> str | None:
        """Why a version must not be used, in one line; None if it passes its checks."""
        return check(model, functools.partial(self._detect_with, model), self._settings)

    def swap(self, model: LoadedModel) -> None:
        """Detects in further images with this version. Returns when the old version has finished its images and is closed."""
        former = None
        if self._threads_for(model) > self._threads:
            self._threads = self._threads_for(model)
            wider = started_pool(self._threads, "detect")
            with self._submitting:
                former, self._pool = self._pool, wider
        self.in_use.swap(model)
        if former:
            former.shutdown()

    def try_canary(self, model: LoadedModel) -> None:
        """Gives this version a fraction of the images too."""
        detect_in = functools.partial(self._detect_with, model)
        self.use_canary(Canary(model, self.model.version, self._settings, detect_in, pictures=self._has_samples))

    def use_canary(self, canary: Canary | None) -> None:
        """Replaces the canary and closes the former one."""
        former, self.canary = self.canary, canary
        if former:
            self._former_canary = former
            former.close()

    def canary_stats(self, wait_s: float = 0.0) -> CanaryStats | None:
        """Figures of the current or the last canary; waits up to `wait_s` seconds for its images under way."""
        canary = self.canary or self._former_canary
        return canary.figures(wait_s) if canary else self.no_canary

    def counted_swaps(self) -> Counter[str]:
        """`swaps` and `refusals` of versions and the canary's counts, since the last call."""
        counts = self.watched.take_counts() if self.watched else Counter()
        canary = self.canary or self._former_canary
        return counts + canary.take_counts() if canary else counts

    def close(self) -> None:
        """Finishes the images under way, then frees memory and threads."""
        if self.watched:
            self.watched.close()
        self._pool.shutdown()
        self.use_canary(None)
        self.in_use.close()

    def start(self, image: EncodedImage) -> Future[DetectedImage | DeadLetter]:
        """Starts detection in one image; its result comes together with those of images started at the same time."""
        result: Future[DetectedImage | DeadLetter] = Future()
        self._waiting.append((image, result))
        PROCESS.parts["detector"].begin()
        with self._submitting:
            self._pool.submit(self._detect_waiting)
        return result

    def detect(self, images: Sequence[EncodedImage]) -> list[DetectedImage | DeadLetter]:
        """Detects in all images; one result for each, in their order."""
        return [started.result() for started in [self.start(image) for image in images]]

    def _detect_waiting(self) -> None:
        """Detects in one thread's share of the waiting images; other threads may have taken them all."""
        share = max(1, min(_together(self.model), len(self._waiting) // self._decoders))
        images: list[EncodedImage] = []
        results: list[Future[DetectedImage | DeadLetter]] = []
        with contextlib.suppress(IndexError):
            while len(images) < share:
                image, result = self._waiting.popleft()
                images.append(image)
                results.append(result)
        try:
            found = list(map(self._with_thumbnail, images, self._detect_together(list(until_cancelled(images)))))
        except BaseException as err:  # noqa: BLE001  the futures pass it on
            for result in results:
                result.set_exception(err)
        else:
            for result, value in zip(results, found, strict=True):
                result.set_result(value)
        finally:
            PROCESS.parts["detector"].end(len(images))

    def _detect_together(self, images: Sequence[EncodedImage]) -> list[DetectedImage | DeadLetter]:
        with self.in_use.taken() as model:  # one version for all of these images
            found = self._detect_with(model, images)
        if canary := self.canary:
            for image, result in zip(images, found, strict=True):
                canary.record_stable(image, result)
        return found

    def _detect_with(self, model: LoadedModel, images: Sequence[EncodedImage]) -> list[DetectedImage | DeadLetter]:
        prepared = [self._prepare(image, model.metadata) for image in images]
        pixels = [ready.pixels for ready in prepared if isinstance(ready, _Prepared)]
        outputs = iter(model.engine(pixels) if pixels else ())
        return [self._finish(ready, next(outputs), model) if isinstance(ready, _Prepared) else ready for ready in prepared]

    def _with_thumbnail(self, image: EncodedImage, result: DetectedImage | DeadLetter) -> DetectedImage | DeadLetter:
        """The same result, with a thumbnail only if it may be a sample; the image is decoded again if the result has none."""
        if not self._sampler.wants(result):
            return dataclasses.replace(result, thumbnail=b"") if result.thumbnail else result
        if not result.thumbnail:
            with self._decoding, contextlib.suppress(ImageError):
                thumbnail = make_thumbnail(image.content, self._settings.max_megapixels * 1e6)
                result = dataclasses.replace(result, thumbnail=thumbnail)
        return result

    def _prepare(self, image: EncodedImage, metadata: DetectorMetadata) -> _Prepared | DeadLetter:
        received_at = image.received_at or time.time()
        with self._decoding:
            started = time.monotonic()
            try:
                decoded, transform, pixels = fitted(image.content, metadata, self._settings)
            except ImageError as err:
                return err.dead_letter(image.ref, _payload(image))
            thumbnail = thumbnail_of(decoded) if self._sampler.wants_any(image.ref.identity) else b""
            fitted_at = time.monotonic()
            return _Prepared(image, received_at, decoded.image_wh, transform, pixels, fitted_at - started, fitted_at, thumbnail)

    def _threads_for(self, model: LoadedModel) -> int:
        return math.ceil(model.engine.images_in_flight / _together(model)) + self._decoders

    def _finish(self, ready: _Prepared, output: Output | ModelFailed, model: LoadedModel) -> DetectedImage | DeadLetter:
        image, returned_at = ready.image, time.monotonic()
        name, version = model.metadata.name, model.version
        try:
            if isinstance(output, ModelFailed):
                raise ImageError("detect", "model_failed", f"the model fails on this image alone: {output}") from output
            detections = to_detections(output.arrays, model.metadata, ready.transform, self._settings)
        except ImageError as err:
            letter = err.dead_letter(image.ref, _payload(image))
            return dataclasses.replace(letter, model_name=name, model_version=version, thumbnail=ready.thumbnail)
        timing = Timing(
            read=image.read_seconds,
            decode=ready.decode_seconds,
            predict=returned_at - ready.fitted_at,
            postprocess=time.monotonic() - returned_at,
            latency=time.time() - ready.received_at,
            finished_at=time.time(),
            led_batch=output.led_batch,
            model=output.model_seconds,
        )
        return DetectedImage(image.ref, *ready.image_wh, name, version, detections, timing, ready.thumbnail)


def fitted(content: bytes, metadata: DetectorMetadata, settings: DetectConfig) -> Fitted:
    """Decodes an image and fits it to a model's input.

    Raises:
      ImageError: The image cannot be decoded.
    """

    def plan(image_wh: Size) -> InputTransform:
        return resize_plan(image_wh, metadata.input_hw, metadata.resize, metadata.letterbox_rule)

    def needed_wh(image_wh: Size) -> Size:
        return plan(image_wh).resized_wh

    decoded = decode_image(content, settings.max_megapixels * 1e6, needed_wh if settings.scaled_decode else None)
    transform, pixels = plan(decoded.image_wh), decoded.pixels
    if metadata.resize != "none":
        pixels = fit_image(pixels, transform, metadata.input_hw, metadata.letterbox_value)
    return Fitted(decoded, transform, pixels)


def _together(model: LoadedModel) -> int:
    """Most images that one thread takes; one where images keep their own size, since their pixels take much memory."""
    return 1 if model.metadata.resize == "none" else _TOGETHER


def _payload(image: EncodedImage) -> bytes:
    """The image's bytes for its dead letter, if they came in a message and cannot be read again."""
    return image.content if image.ref.is_inline else b""
