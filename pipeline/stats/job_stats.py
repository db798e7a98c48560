"""`JobStats`, the mergeable statistics of a job, from which its summary, report, metrics and progress are rendered."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
import numpy as np

from pipeline.records import DeadLetter, DetectedImage, ImageRef, mostly_outside, unsigned
from pipeline.stats.canary_stats import CanaryStats, merge_canaries
from pipeline.stats.histogram import Intervals, Times
from pipeline.stats.samples import Ranked, keep, ranks

VERSION_EVENTS = ("swaps", "refusals", "canary_images", "canary_failed", "canary_objects", "canary_matched", "canary_ms")
STAGES = ("read", "decode", "postprocess")  # each image notes its time in these; the model's time is noted by batch
BINS = 20  # of confidence; bin n begins at n / BINS
OTHER_CLASSES = "(other classes)"
_MOST_OBJECTS = 1000
_MOST_CLASSES = 1000  # COCO has 80, Open Images 601
_MOST_COUNTS = 2 * _MOST_CLASSES * BINS
_MOST_KINDS = 100  # endings of files that are no images
EXAMPLES = 20  # dead letters kept for the report, for each reason
_EXAMPLE_CHARACTERS = 1000  # of each text in an example: a message may name a URI of megabytes
_SUMS = (
    *("read", "skipped", "done", "done_dead", "dead", "batches", "latencies", "publish_latencies", "finished", "publish_ms"),
    *("versions", "model_events", "objects", "outside", "confidences", "left_out"),
)
_LARGEST = ("last", "backlog_age_ms", "batch_sizes", "model_notes", "class_names", "in_use")

ClassConfidences = Counter[tuple[str, Annotated[int, msgspec.Meta(ge=0, lt=BINS)]]]  # detections by class name and bin


@dataclasses.dataclass
class JobStats:
    """Statistics of a part of a job; parts merge in any order, and none grows with the number of images.

    Each bundle of a batch job makes one of its rows, and Beam merges them for the summary. Each process keeps one for its display
    or its stream; a worker writes its own to a report file (see `pipeline.stats.worker_reports`). `pipeline.codec`
    serialises it. It has no lock: threads that share one hold a lock of their own.

    Attributes:
      read: Images listed, or requested by messages.
      skipped: Images listed more than once, not wanted or done before; and listed files that are no images.
      left_out: Of the skipped ones, the files that are no images, by kind.
      done: Of the skipped ones, the images that an earlier run or a stream has done.
      done_dead: Of the done ones, those that have only a permanent dead letter.
      dead: Dead letters by (stage, reason).
      confidences: Detections by (class name, bin of confidence).
      batches: Device batches by batch size.
      stages: Times of an image in each stage, of a batch in `model`; stages of different images overlap.
      latencies: Times of images from the bytes in memory to the result.
      publish_latencies: Of a stream, times from the event time to the publishing of the result.
      backlog_age_ms: Age of the last message that a stream has read; 0 when none came for a while.
      finished: Detected images by the time of their result.
      publish_ms: Of a stream, the largest latency from event time to publishing, by the time of publishing.
      pictures: Detected images with a thumbnail and their ranks, by purpose; see `pipeline.stats.samples`.
      dead_examples: A few dead letters of each reason, with short texts and without payload.
      versions: Images by the model's version.
      last: (when, name, version) of the model last seen.
      in_use: Name and version of the model that this process has in use, also where no image comes; empty: none.
      began: When a detector took the first of the detected images, seconds since the epoch.
      model_events: What happened to model versions, by the name of the Beam counter: `swaps`, `refusals`, `canary_*`.
      batch_sizes: The allowed batch sizes of the model in use; empty if unknown.
      canary: Comparison of the newest canary with the version in use.
      model_notes: What a person should know of how the model in use runs.
      class_names: The names of all classes of the model in use, by number.
      objects: Detected images by number of objects; numbers above `_MOST_OBJECTS` count as that.
      outside: Objects whose box lies for the most part outside of its image.
    """

    read: int = 0
    skipped: int = 0
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)
    done: int = 0
    done_dead: int = 0
    dead: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    confidences: ClassConfidences = dataclasses.field(default_factory=Counter)
    batches: Counter[int] = dataclasses.field(default_factory=Counter)
    stages: dict[str, Times] = dataclasses.field(default_factory=dict)
    latencies: Times = dataclasses.field(default_factory=Times)
    publish_latencies: Times = dataclasses.field(default_factory=Times)
    backlog_age_ms: float = 0.0
    finished: Intervals = dataclasses.field(default_factory=Intervals)
    publish_ms: Intervals = dataclasses.field(default_factory=lambda: Intervals(largest=True))
    pictures: Ranked[DetectedImage] = dataclasses.field(default_factory=dict)
    dead_examples: dict[str, list[DeadLetter]] = dataclasses.field(default_factory=dict)
    versions: Counter[str] = dataclasses.field(default_factory=Counter)
    last: tuple[float, str, str] = (0.0, "", "")
    began: float = math.inf
    in_use: tuple[str, str] = ("", "")
    model_events: Counter[str] = dataclasses.field(default_factory=Counter)
    batch_sizes: tuple[int, ...] = ()
    canary: CanaryStats | None = None
    model_notes: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    objects: Counter[int] = dataclasses.field(default_factory=Counter)
    outside: int = 0

    @property
    def model(self) -> tuple[str, str]:
        """(name, version) of the model last seen."""
        return self.last[1:]

    @property
    def named(self) -> int:
        """Images listed, without the files that are none."""
        return self.read - self.left_out.total()

    @property
    def detected(self) -> int:
        """Images with a result."""
        return len(self.latencies)

    @property
    def classes(self) -> Counter[str]:
        """Detections by class name."""
        return summed((name, amount) for (name, _), amount in self.confidences.items())

    @property
    def failed(self) -> int:
        """Dead letters of all stages."""
        return self.dead.total()

    @property
    def dead_by_reason(self) -> Counter[str]:
        """Dead letters by reason, of which one may stand in several stages."""
        return summed((reason, amount) for (_, reason), amount in self.dead.items())

    @property
    def dead_shares(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """How many images failed, of how many: of those that were tried; and of all, with those that were done before.

        Images that are done do not hide that all new ones failed, and a repeat, which tries none of them, has the same as before.
        """
        tried = self.detected + self.failed
        return (self.failed, tried), (self.failed + self.done_dead, tried + self.done)

    def leave_out(self, kind: str) -> None:
        """Counts a file that is no image."""
        self.left_out[kind] += 1
        self._bound()

    def add_detected(self, images: Sequence[DetectedImage], samples: int) -> None:
        """Counts detected images; keeps those that have a thumbnail and may be among the job's `samples` samples."""
        if not images:
            return
        class_names = [name for image in images for name in image.detections.class_names]
        confidences = np.concatenate([image.detections.confidences for image in images])
        self.confidences.update(zip(class_names, confidence_bins(confidences), strict=True))
        self.objects.update(min(len(image.detections), _MOST_OBJECTS) for image in images)
        self.outside += mostly_outside(images)
        timings = [image.timing for image in images]
        for stage in STAGES:
            self._add_stage(stage, [getattr(timing, stage) for timing in timings])
        batches = [batch for timing in timings for batch in timing.batches]
        self.batches.update(size for size, _ in batches)
        self._add_stage("model", [seconds for _, seconds in batches])
        self.latencies.add([timing.latency for timing in timings])
        for second, count in Counter(int(timing.finished_at) for timing in timings).items():
            self.finished.add(second, count)
        self.began = min(self.began, *(timing.finished_at - timing.latency for timing in timings))
        self.versions.update(image.model_version for image in images)
        self.last = max(self.last, *((image.timing.finished_at, image.model_name, image.model_version) for image in images))
        for image in images:
            if samples and image.thumbnail:
                keep(self.pictures, ranks(image), unsigned(image), samples)
        self._bound()

    def add_dead(self, letter: DeadLetter) -> None:
        """Counts one dead letter."""
        self.dead[letter.stage, letter.reason] += 1
        examples = self.dead_examples.setdefault(letter.reason, [])
        if len(examples) < EXAMPLES:
            ref, message = ImageRef(_cut(letter.ref.uri)), _cut(letter.message)
            examples.append(DeadLetter(ref, letter.stage, letter.reason, message, thumbnail=letter.thumbnail))

    def take_model(self, other: JobStats) -> None:
        """Replaces the facts of the model in use by those that other statistics have."""
        for name in ("batch_sizes", "canary", "model_notes", "class_names", "in_use"):
            setattr(self, name, getattr(other, name))

    def copy(self) -> JobStats:
        """An independent copy; it shares the images of the samples, which do not change."""
        copied = merge_stats([self], 0)
        copied.pictures = {purpose: list(kept) for purpose, kept in self.pictures.items()}
        return copied

    def merge(self, other: JobStats, samples: int) -> None:
        """Adds other statistics to these, and keeps what may be one of the job's `samples` samples."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _LARGEST:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for stage, times in other.stages.items():
            self.stages[stage] = self.stages.get(stage, Times()) + times
        for purpose, kept in other.pictures.items():
            for rank, image in kept:
                keep(self.pictures, {purpose: rank}, image, samples)
        for reason, examples in other.dead_examples.items():
            self.dead_examples[reason] = [*self.dead_examples.get(reason, []), *examples][:EXAMPLES]
        self.began = min(self.began, other.began)
        self.canary = merge_canaries(each for each in (self.canary, other.canary) if each)
        self._bound()

    def _add_stage(self, stage: str, seconds: Sequence[float]) -> None:
        if seconds:
            self.stages.setdefault(stage, Times()).add(seconds)

    def _bound(self) -> None:
        """Sums the rare classes, and the rare kinds of files, once there are too many of them."""
        if len(self.confidences) > _MOST_COUNTS:
            frequent, counts = dict(self.classes.most_common(_MOST_CLASSES)), self.confidences
            self.confidences = Counter()
            for (name, number), amount in counts.items():
                self.confidences[name if name in frequent else OTHER_CLASSES, number] += amount
        if len(self.left_out) > _MOST_KINDS:
            kept = Counter(dict(self.left_out.most_common(_MOST_KINDS // 2)))
            kept["other"] += self.left_out.total() - kept.total()
            self.left_out = kept


def merge_stats(parts: Iterable[JobStats], samples: int) -> JobStats:
    """The statistics of all parts, with what may be one of the job's `samples` samples."""
    merged = JobStats()
    for part in parts:
        merged.merge(part, samples)
    return merged


def summed(amounts: Iterable[tuple[str, int]]) -> Counter[str]:
    """The sums of amounts by name."""
    sums: Counter[str] = Counter()
    for name, amount in amounts:
        sums[name] += amount
    return sums


def confidence_bins(confidences: np.ndarray) -> list[int]:
    """The bin of each confidence. Confidences outside of 0..1 are in the first or last bin.

    >>> confidence_bins(np.array([0.0, 0.25, 1.0, np.nan, np.inf]))
    [0, 5, 19, 0, 19]
    """
    within = np.fmin(np.fmax(confidences, 0), 1)  # not a number counts as 0
    bins: list[int] = np.minimum(within * BINS, BINS - 1).astype(int).tolist()
    return bins


def _cut(text: str) -> str:
    return text if len(text) <= _EXAMPLE_CHARACTERS else text[: _EXAMPLE_CHARACTERS - 1] + "…"
