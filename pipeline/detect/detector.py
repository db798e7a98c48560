"""The detector of one process: encoded images in, one `DetectedImage` or `DeadLetter` for each out.

Threads of a pool each take a few of the images that wait: decode, fit to the model's input, hand to the model's engine, map the
boxes back. There are enough threads that the model always finds the next images waiting, while decoding stays on as many cores
as it may use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from models.geometry import InputTransform, fit_image, resize_plan
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.canary import Canary
from pipeline.detect.check_model import check
from pipeline.detect.decode import decode_image
from pipeline.detect.detections import to_detections
from pipeline.detect.headers.header import Size
from pipeline.detect.loaded_model import LoadedModel, ModelFailed, Output
from pipeline.detect.model_in_use import ModelInUse
from pipeline.detect.model_watcher import ModelWatcher
from pipeline.detect.tensorflow_setup import usable_cores
from pipeline.detect.thumbnails import make_thumbnail
from pipeline.detect.versions import Version
from pipeline.errors import ModelError
from pipeline.failures import ImageError
from pipeline.prefetch import started_pool
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, Timing
from pipeline.stats.canary import CanaryStats
from pipeline.stats.samples import Sampler

_TOGETHER = 4  # images that one thread takes at most: each call of the model costs it half a millisecond


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


class Detector:
    """Detects in images with a loaded model; thread-safe.

    Args:
      model: The model; closed with this.
      detect: How to run it.
      samples: How many images get a thumbnail.

    Attributes:
      watched: The watch of its versions; None where nobody looks for others.
      canary: The version that a share of the images meets besides; None where there is none.
      no_canary: Which version is called canary and why no image meets it; None where none is, or one is up.
      ready_at: When it could be used, seconds since the epoch.
    """

    def __init__(self, model: LoadedModel, detect: DetectConfig, samples: int = 0):
        self._in_use = ModelInUse(model)
        self.watched: ModelWatcher | None = None
        self.canary: Canary | None = None
        self.no_canary: CanaryStats | None = None
        self._former_canary: Canary | None = None
        self._settings = detect
        self._decoders = detect.decode_threads or usable_cores()
        self._decoding = threading.BoundedSemaphore(self._decoders)
        self._sampler = Sampler(samples)
        self._waiting: deque[tuple[EncodedImage, Future[DetectedImage | DeadLetter]]] = deque()
        self._submitting = threading.Lock()
        self._threads = self._threads_for(model)
        self._pool = started_pool(self._threads, "detect")
        self.ready_at = time.time()

    @property
    def model(self) -> LoadedModel:
        """The model in use."""
        return self._in_use.current

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The allowed batch sizes in use."""
        return self.model.engine.batch_sizes

    def check(self, model: LoadedModel) -> str | None:
        """Why a version must not be used, in one line; None where nothing speaks against it."""
        return check(model, lambda images: self._detect_with(model, images, Sampler(0)), self._settings)

    def watch(
        self, model: ModelConfig, in_use: Version, others: Iterable[Version], refused: Mapping[Version, ModelError]
    ) -> None:
        """From now on another version takes the place of the one in use when that is wanted.

        Args:
          model: The model, whose path is a folder of versions.
          in_use: The version that this detector has.
          others: Those that were there when it was chosen.
          refused: Of these, the ones that were tried in vain.
        """
        self.watched = ModelWatcher(model, self._settings, self, in_use=in_use, others=others, refused=refused)
        self.watched.start()

    def swap(self, model: LoadedModel) -> None:
        """Images that are not under way yet meet this version. Returns when those that are, are done; the old one is closed."""
        former = None
        if self._threads_for(model) > self._threads:
            self._threads = self._threads_for(model)
            wider = started_pool(self._threads, "detect")
            with self._submitting:
                former, self._pool = self._pool, wider
        self._in_use.swap(model)
        if former:
            former.shutdown()

    def try_canary(self, model: LoadedModel) -> None:
        """From now on a share of the images meets this version as well, or instead."""
        sampler = self._sampler if self._settings.canary_mode == "live" else Sampler(0)
        detect_in = functools.partial(self._detect_with, model, sampler=sampler)
        self.use_canary(Canary(model, self.model.version, self._settings, detect_in))

    def use_canary(self, canary: Canary | None) -> None:
        """From now on a share of the images meets this version, or none does; the canary before is closed."""
        former, self.canary = self.canary, canary
        if former:
            self._former_canary = former
            former.close()

    def canary_stats(self, wait_s: float = 0.0) -> CanaryStats | None:
        """What the canary has shown, or the last one; waits up to so many seconds for what it has in hand."""
        canary = self.canary or self._former_canary
        return canary.figures(wait_s) if canary else self.no_canary

    def unload(self) -> None:
        """Images that are not under way yet wait for the next `swap`. Returns when the others are done; the model is closed."""
        self._in_use.unload()

    def fail_pending(self, failure: str) -> None:
        """There will be no model: images that wait, or come, fail their bundles."""
        self._in_use.fail_pending(failure)

    def counted_swaps(self) -> Counter[str]:
        """`swaps` of versions, their `refusals`, and what a canary did, since this was last asked."""
        counts = self.watched.take_counts() if self.watched else Counter()
        canary = self.canary or self._former_canary
        return counts + canary.take_counts() if canary else counts

    def close(self) -> None:
        """Gives back memory and threads, once the images under way are done."""
        if self.watched:
            self.watched.close()
        self._pool.shutdown()
        self.use_canary(None)
        self._in_use.close()

    def start(self, image: EncodedImage) -> Future[DetectedImage | DeadLetter]:
        """Begins to detect in one image; its result is there when the images that were started with it are done."""
        result: Future[DetectedImage | DeadLetter] = Future()
        self._waiting.append((image, result))
        with self._submitting:
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
        canary = self.canary
        if not canary:
            return self._detect_in_use(images)
        chosen = {n: image for n, image in enumerate(images) if canary.is_live and canary.wants(image)}
        found: dict[int, DetectedImage | DeadLetter] = {**canary.answers(chosen)}
        rest = [n for n in range(len(images)) if n not in found]
        if rest:
            found |= zip(rest, self._detect_in_use([images[n] for n in rest]), strict=True)
        for n in rest:
            canary.saw_stable(images[n], found[n])
        return [found[n] for n in range(len(images))]

    def _detect_in_use(self, images: Sequence[EncodedImage]) -> list[DetectedImage | DeadLetter]:
        with self._in_use.taken() as model:  # once: what these images meet from here on is one version
            return self._detect_with(model, images, self._sampler)

    def _detect_with(
        self, model: LoadedModel, images: Sequence[EncodedImage], sampler: Sampler
    ) -> list[DetectedImage | DeadLetter]:
        prepared = [self._prepare(image, model.metadata, sampler) for image in images]
        pixels = [ready.pixels for ready in prepared if isinstance(ready, _Prepared)]
        outputs = iter(model.engine(pixels) if pixels else ())
        return [self._finish(ready, next(outputs), model) if isinstance(ready, _Prepared) else ready for ready in prepared]

    def _prepare(self, image: EncodedImage, metadata: DetectorMetadata, sampler: Sampler) -> _Prepared | DeadLetter:
        """Decodes an image and fits it to the model's input."""

        def needed_wh(image_wh: Size) -> Size:
            return resize_plan(image_wh, metadata.input_hw, metadata.resize).resized_wh

        settings = self._settings
        received_at = image.received_at or time.time()
        with self._decoding:
            started = time.monotonic()
            try:
                decoded = decode_image(
                    image.content, settings.max_megapixels * 1e6, needed_wh if settings.scaled_decode else None
                )
            except ImageError as err:
                return err.dead_letter(image.ref, _payload(image))
            transform = resize_plan(decoded.image_wh, metadata.input_hw, metadata.resize)
            pixels = fit_image(decoded.pixels, transform, metadata.input_hw, metadata.letterbox_value)
            thumbnail = make_thumbnail(decoded.pixels) if sampler.wants(image.ref.identity) else b""
            fitted_at = time.monotonic()
            return _Prepared(image, received_at, decoded.image_wh, transform, pixels, thumbnail, fitted_at - started, fitted_at)

    def _threads_for(self, model: LoadedModel) -> int:
        return math.ceil(model.engine.images_in_flight / _TOGETHER) + self._decoders

    def _finish(self, ready: _Prepared, output: Output | ModelFailed, model: LoadedModel) -> DetectedImage | DeadLetter:
        """Maps the model's output back to the image."""
        image, returned_at = ready.image, time.monotonic()
        try:
            if isinstance(output, ModelFailed):
                raise ImageError("detect", "model_failed", f"the model fails on this image alone: {output}") from output
            detections = to_detections(output.arrays, model.metadata, ready.transform, self._settings)
        except ImageError as err:
            letter = err.dead_letter(image.ref, _payload(image))
            return dataclasses.replace(letter, model_name=model.metadata.name, model_version=model.version)
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
        return DetectedImage(image.ref, *ready.image_wh, model.metadata.name, model.version, detections, timing, ready.thumbnail)


def _payload(image: EncodedImage) -> bytes:
    """What a dead letter keeps of an image: its bytes, where they cannot be read again."""
    return image.content if image.ref.is_inline else b""
