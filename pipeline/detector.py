"""The detector of one process: encoded images in, one `DetectedImage` or `DeadLetter` for each out.

Every image is its own small task on a pool: decode, fit to the model's input, hand to the batch scheduler, map the boxes back.
There are enough
tasks in flight that the model always finds the next batch waiting, while decoding stays on as many cores as it may use.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from models.geometry import fit_image, resize_plan
from models.metadata import DetectorMetadata
from pipeline import progress, saved_model
from pipeline.batching import BatchedModel
from pipeline.config import DetectConfig, ModelConfig
from pipeline.decode import DecodeError, Size, decode_image
from pipeline.detections import check_classes, to_detections
from pipeline.errors import ModelError
from pipeline.pools import started_pool
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, ImageRef, Timing
from pipeline.samples import make_thumbnail
from pipeline.sampling import Sampler

_CPU_LADDER = (1, 2, 4)  # on CPU larger batches gain nothing, and each of their images waits for all: BENCHMARKS.md
_GPU_LADDER = (1, 2, 4, 8, 16, 32)

_shared: dict[tuple[ModelConfig, DetectConfig, int], Detector] = {}
_shared_lock = threading.Lock()


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
        threads = detect.decode_threads or saved_model.usable_cores()
        self._decoding = threading.BoundedSemaphore(threads)
        self._sampler = Sampler(samples)
        try:
            self._model.warm_up()
        except tf.errors.OpError as err:
            raise ModelError(f"model {model.path}: fails on a blank image: {_reason(err)}") from err
        self._pool = started_pool(self._model.images_in_flight + threads, "detect")
        for request in saved.warmup_requests:
            try:
                self._run_warmup_request(request)
            except (DecodeError, tf.errors.OpError) as err:
                reason = _reason(err) if isinstance(err, tf.errors.OpError) else str(err)
                raise ModelError(f"model {model.path}: fails on a request of its warm-up file: {reason}") from err
        self.ready_at = time.time()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch ladder in use."""
        return self._model.batch_sizes

    def start(self, image: EncodedImage) -> Future[DetectedImage | DeadLetter]:
        """Begins to detect in one image; its result is there when the images that were started with it are done."""
        return self._pool.submit(self._detect_one, image)

    def detect(self, images: Sequence[EncodedImage]) -> list[DetectedImage | DeadLetter]:
        """Detects in all images; one result for each, in their order."""
        return list(self._pool.map(self._detect_one, images))

    def _detect_one(self, image: EncodedImage) -> DetectedImage | DeadLetter:
        import tensorflow as tf

        try:
            result: DetectedImage | DeadLetter = self._detect_readable(image)
            progress.count("detected")
        except DecodeError as err:
            result = DeadLetter(image.ref, "decode", err.reason, str(err), _payload(image))
            progress.count("dead")
        except tf.errors.OpError as err:
            if isinstance(err, tf.errors.ResourceExhaustedError):
                raise  # even one image does not fit: that may pass, and is no fault of the image
            message = f"the model fails on this image alone: {_reason(err)}"
            result = DeadLetter(image.ref, "detect", "model_failed", message, _payload(image))
            progress.count("dead")
        return result

    def _detect_readable(self, image: EncodedImage) -> DetectedImage:
        received_at = image.received_at or time.time()
        with self._decoding:
            started = time.monotonic()
            decoded = decode_image(image.content, self._settings.max_megapixels * 1e6, self._needed_wh)
            transform = resize_plan(decoded.image_wh, self.metadata.input_hw, self.metadata.resize)
            pixels = fit_image(decoded.pixels, transform, self.metadata.input_hw, self.metadata.letterbox_value)
            thumbnail = make_thumbnail(decoded.pixels) if self._sampler.wants(image.ref.identity) else b""
            image_wh = decoded.image_wh
            del decoded  # a large image's pixels must not stay while this task waits for its batch
        fitted = time.monotonic()
        answer = self._model(pixels)
        answered = time.monotonic()
        detections = to_detections(answer.outputs, self.metadata, transform, self._settings)
        finished = time.monotonic()
        timing = Timing(
            read=image.read_seconds,
            decode=fitted - started,
            predict=answered - fitted,
            postprocess=finished - answered,
            latency=time.time() - received_at,
            finished_at=time.time(),
            led_batch=answer.led_batch,
            model=answer.model_seconds,
        )
        return DetectedImage(image.ref, *image_wh, self.metadata.name, self.version, detections, timing, thumbnail)

    def _needed_wh_for(self, image_wh: Size) -> Size:
        return resize_plan(image_wh, self.metadata.input_hw, self.metadata.resize).resized_wh

    def _run_warmup_request(self, request: bytes | np.ndarray) -> None:
        """One request of TF Serving's warm-up file: an encoded image goes all the way, an array to the model alone."""
        if isinstance(request, bytes):
            self._detect_readable(EncodedImage(ImageRef("warm-up request"), request))
        else:
            for pixels in request:
                self._model(pixels)


def _payload(image: EncodedImage) -> bytes:
    """What a dead letter keeps of an image: its bytes, where they cannot be read again."""
    return image.content if image.ref.is_inline else b""


def _reason(err: Any) -> str:
    """The telling line of TensorFlow's many: the last one that names no node."""
    lines = [line for line in (err.message or "").splitlines() if line.strip() and "[[{{node" not in line]
    return (lines or [type(err).__name__])[-1].strip()[:300]
