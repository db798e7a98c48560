"""Shadow and live canary: another model version also gets a fraction of the images (`shadow`), or gets them instead (`live`).

The canary has its own threads and a short queue, so that it cannot harm the images. In shadow mode the job never waits for it,
and images that do not fit into the queue are left out. In live mode an image that the canary fails on, or does not answer in
time, goes to the version in use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from models.evaluate.agreement import compare
from pipeline.config import DetectConfig
from pipeline.detect.golden import DetectIn
from pipeline.detect.loaded_model import LoadedModel
from pipeline.detect.thumbnails import make_thumbnail
from pipeline.failures import ImageError
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, detection_row, identity_hash
from pipeline.stats.canary import MORE_FAILURES, CanaryStats, Disagreement

_THREADS = 2
_MOST_WAITING = 16  # groups of images
_LONGEST_SECONDS = 10.0  # that a live image waits for the canary
_CLOSE_SECONDS = 10.0


@dataclasses.dataclass(eq=False)
class _Group:
    """Images for the canary; `beside`: results of the version in use; `abandoned`: the live images no longer wait."""

    images: Sequence[EncodedImage]
    beside: Sequence[DetectedImage | DeadLetter] = ()
    found: Sequence[DetectedImage | DeadLetter] = ()
    abandoned: bool = False
    done: threading.Event = dataclasses.field(default_factory=threading.Event)


class Canary:
    """A model version on trial; thread-safe.

    Args:
      model: The version; the canary closes it.
      stable: The version in use.
      detect: Share, mode and bounds.
      detect_in: Detects with the canary.
      longest_s: How long a live image waits for it.
      pictures: Whether the report shows images that the versions differ on.
    """

    def __init__(
        self,
        model: LoadedModel,
        stable: str,
        detect: DetectConfig,
        detect_in: DetectIn,
        longest_s: float = _LONGEST_SECONDS,
        *,
        pictures: bool = False,
    ):
        self.model = model
        self.is_live = detect.canary_mode == "live"
        self._below = int(detect.canary_share * 2**64)
        self._settings = detect
        self._detect_in = detect_in
        self._longest_s = longest_s
        self._pictures = pictures
        self._waiting: queue.Queue[_Group | None] = queue.Queue(_MOST_WAITING)
        self._figures = CanaryStats(model.version, stable, detect.canary_mode)
        self._reported: Counter[str] = Counter()
        self._hangs = self._closed = False
        self._lock = threading.Lock()  # guards the figures and `abandoned`
        # daemons, so that a canary that hangs does not keep the job from ending
        self._threads = [threading.Thread(target=self._work, name="canary", daemon=True) for _ in range(_THREADS)]
        for thread in self._threads:
            thread.start()

    def wants(self, image: EncodedImage) -> bool:
        """Whether an image belongs to the canary's share; deterministic for each image."""
        return identity_hash(f"canary {image.ref.identity}") < self._below  # another hash picks samples and shards

    def answers(self, images: Mapping[int, EncodedImage]) -> dict[int, DetectedImage]:
        """Detects in live images; leaves out those that the canary fails on or does not answer in time."""
        group = _Group([*images.values()])
        if not images or not self._submit(group):
            return {}
        if not group.done.wait(self._longest_s):
            with self._lock:
                group.abandoned = not group.done.is_set()
            if group.abandoned:
                self._hangs = True
                self._count(images=len(images), failed=len(images))
                return {}
        pairs = zip(images, group.found, strict=False)  # `found` is empty if the canary failed
        return {number: result for number, result in pairs if isinstance(result, DetectedImage)}

    def saw_stable(self, image: EncodedImage, result: DetectedImage | DeadLetter) -> None:
        """Counts a result of the version in use; in shadow mode compares the canary's result with it."""
        if not _is_answer(result):
            return
        failed = isinstance(result, DeadLetter)
        self._count(stable_images=1, stable_failed=int(failed), stable_seconds=_seconds(result))
        if not self.is_live and self.wants(image):
            self._submit(_Group([image], [result]))

    def figures(self, wait_s: float = 0.0) -> CanaryStats:
        """Figures so far; waits up to `wait_s` seconds for images under way."""
        until = time.monotonic() + wait_s
        while self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.01)
        with self._lock:
            return dataclasses.replace(self._figures)

    def verdict(self) -> str:
        """`promoted` or `dropped`, by the figures; empty until the canary has had enough images."""
        shown = self.figures()
        works = shown.failure_rate <= shown.stable_failure_rate + MORE_FAILURES
        if shown.images < self._settings.canary_images or (works and not shown.objects):  # no objects show nothing
            return ""
        agrees = shown.agreement is not None and shown.agreement >= self._settings.min_agreement
        return "promoted" if agrees and works else "dropped"

    def decide(self, outcome: str) -> CanaryStats:
        """Stores the outcome; returns all figures."""
        with self._lock:
            self._figures.outcome = outcome
            return dataclasses.replace(self._figures)

    def take_counts(self) -> Counter[str]:
        """Counts since the last call, as integers."""
        shown = self.figures()
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
            self.model.engine.close()
        with contextlib.suppress(queue.Empty):
            while True:
                if group := self._waiting.get_nowait():
                    group.done.set()  # submitted while the canary was closing
        return ended

    def _submit(self, group: _Group) -> bool:
        try:
            if self._closed or (self._hangs and self.is_live):
                raise queue.Full
            self._waiting.put_nowait(group)
        except queue.Full:
            self._count(left_out=len(group.images))
            return False
        return True

    def _work(self) -> None:
        while (group := self._waiting.get()) is not None:
            counts: dict[str, float] = {"images": len(group.images), "failed": len(group.images)}
            with contextlib.suppress(BaseException):  # any error is a failure of the canary
                found = self._detect_in(group.images)
                counts = self._counts(group.images, found, group.beside)
                group.found = found
            with self._lock:
                group.done.set()
            if not group.abandoned:
                self._count(**counts)
            self._hangs = False
            self._waiting.task_done()
        self._waiting.task_done()

    def _counts(
        self,
        images: Sequence[EncodedImage],
        found: Sequence[DetectedImage | DeadLetter],
        beside: Sequence[DetectedImage | DeadLetter],
    ) -> dict[str, float]:
        pairs = [self._compared(*each) for each in zip(images, found, beside, strict=True)] if beside else []
        answered = [result for result in found if _is_answer(result)]
        return {
            "images": len(answered),
            "failed": sum(isinstance(result, DeadLetter) for result in answered),
            "seconds": sum(map(_seconds, answered)),
            "matched": sum(matched for matched, _, _ in pairs),
            "objects": sum(objects for _, objects, _ in pairs),
            "score_shift_sum": sum(shift for _, _, shift in pairs),
        }

    def _compared(
        self, image: EncodedImage, ours: DetectedImage | DeadLetter, theirs: DetectedImage | DeadLetter
    ) -> tuple[int, int, float]:
        """(objects that both detected, objects of both in all, sum of the differences of confidence)."""
        if isinstance(ours, DeadLetter) or isinstance(theirs, DeadLetter):
            return 0, 0, 0.0
        result = compare([detection_row(ours)], [detection_row(theirs)])
        shift = (result["mean_score_difference"] or 0.0) * result["matched"]
        objects = result["detections"] + result["reference_detections"]
        self._keep_picture(objects - 2 * result["matched"], image, theirs, ours)
        return result["matched"], objects, shift

    def _keep_picture(self, different: int, image: EncodedImage, stable: DetectedImage, ours: DetectedImage) -> None:
        """Keeps an image for the report if few images differ more; the image is decoded again, since few are kept."""
        if not self._pictures or not self._figures.wants_picture(different):
            return
        with contextlib.suppress(ImageError):
            thumbnail = make_thumbnail(image.content, self._settings.max_megapixels * 1e6)
            with self._lock:
                self._figures.add_disagreement(Disagreement(different, dataclasses.replace(stable, thumbnail=thumbnail), ours))

    def _count(self, **counts: float) -> None:
        with self._lock:
            for name, amount in counts.items():
                setattr(self._figures, name, getattr(self._figures, name) + amount)


def _is_answer(result: DetectedImage | DeadLetter) -> bool:
    """Whether a model made this result; no model sees an image that cannot be decoded."""
    return isinstance(result, DetectedImage) or result.stage == "detect"


def _seconds(result: DetectedImage | DeadLetter) -> float:
    return result.timing.predict if isinstance(result, DetectedImage) else 0.0
