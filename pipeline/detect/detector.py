"""The detector of one process: encoded images in, one `DetectedImage` or `DeadLetter` for each out.

Threads of a pool each take a few of the images that wait: decode, fit to the model's input, hand to the batch scheduler, map the
boxes back. There are enough threads that the model always finds the next batch waiting, while decoding stays on as many cores as
it may use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from models.geometry import InputTransform, fit_image, resize_plan
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import saved_model
from pipeline.detect.batching import Answer, BatchedModel
from pipeline.detect.decode import decode_image
from pipeline.detect.detections import check_classes, to_detections
from pipeline.detect.headers.header import Size
from pipeline.detect.thumbnails import make_thumbnail
from pipeline.errors import ModelError
from pipeline.failures import ImageError
from pipeline.figures.samples import Sampler
from pipeline.look_ahead import started_pool
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, ImageRef, Timing

if TYPE_CHECKING:
    from tensorflow.errors import OpError

_CPU_LADDER = (1, 2, 4)  # on CPU larger batches gain nothing, and each of their images waits for all
_GPU_LADDER = (1, 2, 4, 8, 16, 32)
_TOGETHER = 4  # images that one thread takes at most: each call of the model costs it half a millisecond

_shared: dict[tuple[ModelConfig, DetectConfig, int], Detector] = {}
_shared_lock = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared:
    """An image on its way into the model; its full-sized pixels are gone."""

    image: EncodedImage
    received_at: float
    image_wh: Size
    transform: InputTransform
    pixels: np.ndarray
    thumbnail: bytes
    decode_seconds: float
    fitted_at: float


def shared_detector(model: ModelConfig, detect: DetectConfig, samples: int = 0) -> Detector:
    """The detector of this process for these settings; loaded and warmed at the first call, and kept while the process lives."""
    key = (model, detect, samples)
    with _shared_lock:
        if key not in _shared:
            _shared[key] = Detector(model, detect, samples)
        return _shared[key]


class Detector:
    """A loaded, warmed detector; thread-safe.

    Args:
      model: Which model, and what it does not say of itself.
      detect: How to run it.
      samples: How many images get a thumbnail for the report: those with the smallest hashes of their identity.

    Attributes:
      metadata: What the model says of itself.
      version: Its version.
      ready_at: When it was loaded and warm, seconds since the epoch.

    Raises:
      ModelError: The model cannot be used.
    """

    def __init__(self, model: ModelConfig, detect: DetectConfig, samples: int = 0):
        saved = saved_model.load(model, detect)
        import tensorflow as tf

        self.metadata: DetectorMetadata = saved.metadata
        self.version = saved.version
        self._settings = detect
        self._needed_wh = self._needed_wh_for if detect.scaled_decode else None
        check_classes(detect.classes, saved.metadata)
        gpu = bool(tf.config.get_visible_devices("GPU"))
        ladder = detect.batch_sizes or (_GPU_LADDER if gpu else _CPU_LADDER)
        self._model = BatchedModel(
            saved.predict,
            saved.metadata.input_hw,
            (saved.fixed_batch,) if saved.fixed_batch else ladder,
            saved_model.streams_of(detect, gpu),
            detect.batch_timeout_ms,
        )
        self._decoders = detect.decode_threads or saved_model.usable_cores()
        self._decoding = threading.BoundedSemaphore(self._decoders)
        self._sampler = Sampler(samples)
        try:
            self._model.warm_up()
        except tf.errors.OpError as err:
            raise ModelError(f"model {model.path}: fails on a blank image: {_reason(err)}") from err
        self._waiting: deque[tuple[EncodedImage, Future[DetectedImage | DeadLetter]]] = deque()
        self._pool = started_pool(math.ceil(self._model.images_in_flight / _TOGETHER) + self._decoders, "detect")
        for request in saved.warmup_requests:
            failure = self._run_warmup_request(request)
            if failure:
                raise ModelError(f"model {model.path}: fails on a request of its warm-up file: {failure}")
        self.ready_at = time.time()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch ladder in use."""
        return self._model.batch_sizes

    def start(self, image: EncodedImage) -> Future[DetectedImage | DeadLetter]:
        """Begins to detect in one image; its result is there when the images that were started with it are done."""
        result: Future[DetectedImage | DeadLetter] = Future()
        self._waiting.append((image, result))
        self._pool.submit(self._detect_waiting)
        return result

    def detect(self, images: Sequence[EncodedImage]) -> list[DetectedImage | DeadLetter]:
        """Detects in all images; one result for each, in their order."""
        return [started.result() for started in [self.start(image) for image in images]]

    def _detect_waiting(self) -> None:
        """One decoder's share of the images that wait now; nothing where other threads have taken them all."""
        share = max(1, min(_TOGETHER, len(self._waiting) // self._decoders))
        images: list[EncodedImage] = []
        results: list[Future[DetectedImage | DeadLetter]] = []
        with contextlib.suppress(IndexError):
            while len(images) < share:
                image, result = self._waiting.popleft()
                images.append(image)
                results.append(result)
        try:
            found = self._detect_together(images)
        except BaseException as err:  # noqa: BLE001  whoever waits for the results must learn of it
            for result in results:
                result.set_exception(err)
        else:
            for result, value in zip(results, found, strict=True):
                result.set_result(value)

    def _detect_together(self, images: Sequence[EncodedImage]) -> list[DetectedImage | DeadLetter]:
        prepared = [self._prepare(image) for image in images]
        answers = iter(self._model([ready.pixels for ready in prepared if isinstance(ready, _Prepared)]))
        return [self._finish(ready, next(answers)) if isinstance(ready, _Prepared) else ready for ready in prepared]

    def _prepare(self, image: EncodedImage) -> _Prepared | DeadLetter:
        """Decodes an image and fits it to the model's input."""
        received_at = image.received_at or time.time()
        with self._decoding:
            started = time.monotonic()
            try:
                decoded = decode_image(image.content, self._settings.max_megapixels * 1e6, self._needed_wh)
            except ImageError as err:
                return err.dead_letter(image.ref, _payload(image))
            transform = resize_plan(decoded.image_wh, self.metadata.input_hw, self.metadata.resize)
            pixels = fit_image(decoded.pixels, transform, self.metadata.input_hw, self.metadata.letterbox_value)
            thumbnail = make_thumbnail(decoded.pixels) if self._sampler.wants(image.ref.identity) else b""
            fitted_at = time.monotonic()
            return _Prepared(image, received_at, decoded.image_wh, transform, pixels, thumbnail, fitted_at - started, fitted_at)

    def _finish(self, ready: _Prepared, answer: Answer | OpError) -> DetectedImage | DeadLetter:
        """Maps the model's answer back to the image."""
        image, answered_at = ready.image, time.monotonic()
        if not isinstance(answer, Answer):
            message = f"the model fails on this image alone: {_reason(answer)}"
            return ImageError("detect", "model_failed", message).dead_letter(image.ref, _payload(image))
        detections = to_detections(answer.outputs, self.metadata, ready.transform, self._settings)
        timing = Timing(
            read=image.read_seconds,
            decode=ready.decode_seconds,
            predict=answered_at - ready.fitted_at,
            postprocess=time.monotonic() - answered_at,
            latency=time.time() - ready.received_at,
            finished_at=time.time(),
            led_batch=answer.led_batch,
            model=answer.model_seconds,
        )
        return DetectedImage(image.ref, *ready.image_wh, self.metadata.name, self.version, detections, timing, ready.thumbnail)

    def _needed_wh_for(self, image_wh: Size) -> Size:
        return resize_plan(image_wh, self.metadata.input_hw, self.metadata.resize).resized_wh

    def _run_warmup_request(self, request: bytes | np.ndarray) -> str:
        """One request of TF Serving's warm-up file: an encoded image goes all the way, an array to the model alone.

        Returns:
          Why it fails; "" if it does not.
        """
        if isinstance(request, bytes):
            found = self._detect_together([EncodedImage(ImageRef("warm-up request"), request)])
            return next((result.message for result in found if isinstance(result, DeadLetter)), "")
        return next((_reason(answer) for answer in self._model(list(request)) if not isinstance(answer, Answer)), "")


def _payload(image: EncodedImage) -> bytes:
    """What a dead letter keeps of an image: its bytes, where they cannot be read again."""
    return image.content if image.ref.is_inline else b""


def _reason(err: OpError) -> str:
    """The telling line of TensorFlow's many: the last one that names no node."""
    lines = [line for line in (err.message or "").splitlines() if line.strip() and "[[{{node" not in line]
    return (lines or [type(err).__name__])[-1].strip()[:300]
