"""Shadow canary: another model version also gets a fraction of the images; its results are compared, never written.

The canary has its own threads and a short queue, so that it cannot harm the images: the job never waits for it, and images that
do not fit into the queue are skipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from models.evaluate.agreement import compare
from pipeline.config import DetectConfig
from pipeline.detect.golden import DetectIn
from pipeline.detect.loaded_model import LoadedModel
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, Image, ImageRef, detection_row, identity_hash, unsigned
from pipeline.stats.canary_stats import CanaryStats, Disagreement

_THREADS = 2
_MOST_WAITING = 16  # images
_CLOSE_SECONDS = 10.0


class Canary:
    """A model version on trial; thread-safe.

    Args:
      model: The version; the canary closes it.
      stable: The version in use.
      detect: Share and bounds.
      detect_in: Detects with the canary.
      thumbnail: Makes the pictures of the report of images that the versions differ on; None: it shows none.
    """

    def __init__(
        self,
        model: LoadedModel,
        stable: str,
        detect: DetectConfig,
        detect_in: DetectIn,
        thumbnail: Callable[[Image], bytes] | None = None,
    ):
        self.model = model
        self._below = int(detect.canary_share * 2**64)
        self._detect_in = detect_in
        self._thumbnail = thumbnail
        self._waiting: queue.Queue[tuple[Image, DetectedImage | DeadLetter] | None] = queue.Queue(_MOST_WAITING)
        self._figures = CanaryStats(model.version, stable)
        self._reported: Counter[str] = Counter()
        self._closed = False
        self._lock = threading.Lock()  # guards the figures
        # daemons, so that a canary that hangs does not keep the job from ending
        self._threads = [threading.Thread(target=self._work, name="canary", daemon=True) for _ in range(_THREADS)]
        for thread in self._threads:
            thread.start()

    def wants(self, ref: ImageRef) -> bool:
        """Whether an image belongs to the canary's share; deterministic for each image."""
        return identity_hash(f"canary {ref.identity}") < self._below  # another hash picks samples and shards

    def record_stable(self, image: Image, result: DetectedImage | DeadLetter) -> None:
        """Counts a result of the version in use; if the image is of the canary's share, compares the canary's with it."""
        if not _is_answer(result):
            return
        self._count(stable_images=1, stable_failed=int(isinstance(result, DeadLetter)), stable_seconds=_seconds(result))
        if not self.wants(result.ref):
            return
        image = image if isinstance(image, EncodedImage) else result.ref  # with its generation
        try:
            if self._closed:
                raise queue.Full
            self._waiting.put_nowait((image, result))
        except queue.Full:
            self._count(skipped=1)

    def figures(self, wait_s: float = 0.0) -> CanaryStats:
        """Figures so far; waits up to `wait_s` seconds for images under way."""
        until = time.monotonic() + wait_s
        while self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.01)
        with self._lock:
            return dataclasses.replace(self._figures)

    def take_counts(self) -> Counter[str]:
        """Counts since the last call, as integers."""
        with self._lock:
            shown = self._figures
            counts = Counter({f"canary_{name}": getattr(shown, name) for name in ("images", "failed", "matched", "objects")})
            counts["canary_ms"] = int(shown.seconds * 1e3)
            new, self._reported = counts - self._reported, counts
        return new

    def close(self) -> bool:
        """Stops the threads and frees memory; returns False if the canary hangs and keeps both."""
        self._closed = True  # the queue only gets shorter now
        until = time.monotonic() + _CLOSE_SECONDS
        for _ in self._threads:
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=max(0.0, until - time.monotonic()))
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended:
            self.model.batcher.close()
        return ended

    def _work(self) -> None:
        while waiting := self._waiting.get():
            try:
                self._compare(*waiting)
            except BaseException:  # noqa: BLE001  any error is a failure of the canary
                self._count(images=1, failed=1)
            self._waiting.task_done()
        self._waiting.task_done()

    def _compare(self, image: Image, stable: DetectedImage | DeadLetter) -> None:
        (ours,) = self._detect_in([image])
        if not _is_answer(ours):
            return
        if isinstance(ours, DeadLetter) or isinstance(stable, DeadLetter):
            self._count(images=1, failed=int(isinstance(ours, DeadLetter)), seconds=_seconds(ours))
            return
        result = compare([detection_row(ours)], [detection_row(stable)])
        matched, objects = result["matched"], result["detections"] + result["reference_detections"]
        shift = (result["mean_score_difference"] or 0.0) * matched
        self._keep_picture(objects - 2 * matched, image, stable, ours)
        self._count(images=1, seconds=_seconds(ours), matched=matched, objects=objects, score_shift_sum=shift)

    def _keep_picture(self, different: int, image: Image, stable: DetectedImage, ours: DetectedImage) -> None:
        """Keeps an image for the report if few images differ more; the image is read and decoded again, since few are kept."""
        if not self._thumbnail or not self._figures.wants_picture(different):
            return
        if thumbnail := self._thumbnail(image):
            with self._lock:
                shown = replace(unsigned(stable), thumbnail=thumbnail)
                self._figures.add_disagreement(Disagreement(different, shown, unsigned(ours)))

    def _count(self, **counts: float) -> None:
        with self._lock:
            for name, amount in counts.items():
                setattr(self._figures, name, getattr(self._figures, name) + amount)


def _is_answer(result: DetectedImage | DeadLetter) -> bool:
    """Whether a model made this result; no model sees an image that cannot be decoded."""
    return isinstance(result, DetectedImage) or result.stage == "detect"


def _seconds(result: DetectedImage | DeadLetter) -> float:
    return result.timing.predict if isinstance(result, DetectedImage) else 0.0
