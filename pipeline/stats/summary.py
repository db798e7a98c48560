"""`JobStats`, the mergeable statistics of a job, and `summarise`, which makes the content of summary.json of them."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.records import DeadLetter, DetectedImage, dead_letter_row, mostly_outside, row_bytes
from pipeline.secrets import with_public_addresses
from pipeline.stats.canary import CanaryStats, merge_canaries
from pipeline.stats.classes import ClassConfidences, bounded, by_class, confidence_bins, confidences_shown
from pipeline.stats.doubts import MOST_OBJECTS, doubts
from pipeline.stats.histogram import Intervals, Times
from pipeline.stats.samples import Ranked, keep, ranks

VERSION_EVENTS = ("swaps", "refusals", "canary_images", "canary_failed", "canary_objects", "canary_matched", "canary_ms")
STAGES = ("read", "decode", "postprocess")  # each image notes its time in these; the model's time is noted by batch
_EXAMPLES = 20  # dead letters kept for the report, for each reason
_EXAMPLE_CHARACTERS = 1000  # of each text in an example: a message may name a URI of megabytes
_MOST_KINDS = 100  # endings of files that are no images
_KINDS_SHOWN = 8
_SUMS = (
    *("read", "skipped", "done", "dead", "confidences", "batches", "latencies", "publish_latencies", "finished", "publish_ms"),
    *("versions", "model_events", "objects", "outside"),
)
_LARGEST = ("last", "backlog_age_ms", "batch_sizes", "model_notes")


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
      dead: Dead letters by (stage, reason).
      confidences: Detections by (class name, bin of confidence); see `pipeline.stats.classes`.
      batches: Device batches by batch size.
      stages: Times of an image in each stage, of a batch in `model`; stages of different images overlap.
      latencies: Times of images from the bytes in memory to the result.
      publish_latencies: Of a stream, times from the event time to the publishing of the result.
      backlog_age_ms: Age of the last message that a stream has read; 0 when none came for a while.
      finished: Detected images by the time of their result.
      publish_ms: Of a stream, the largest latency from event time to publishing, by the time of publishing.
      pictures: Detected images with a thumbnail and their ranks, by purpose; see `pipeline.stats.samples`.
      dead_examples: A few dead letters of each reason, as rows.
      versions: Images by the model's version.
      last: (when, name, version) of the model last seen.
      began: When a detector took the first of the detected images, seconds since the epoch.
      model_events: What happened to model versions, by the name of the Beam counter: `swaps`, `refusals`, `canary_*`.
      batch_sizes: The allowed batch sizes of the model in use; empty if unknown.
      canary: Comparison of the newest canary with the version in use.
      model_notes: What a person should know of how the model in use runs.
      objects: Detected images by number of objects; numbers above `MOST_OBJECTS` count as that.
      outside: Objects whose box lies for the most part outside of its image.
    """

    read: int = 0
    skipped: int = 0
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)
    done: int = 0
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
    dead_examples: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    versions: Counter[str] = dataclasses.field(default_factory=Counter)
    last: tuple[float, str, str] = (0.0, "", "")
    began: float = math.inf
    model_events: Counter[str] = dataclasses.field(default_factory=Counter)
    batch_sizes: tuple[int, ...] = ()
    canary: CanaryStats | None = None
    model_notes: tuple[str, ...] = ()
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
        return by_class(self.confidences)

    @property
    def failed(self) -> int:
        """Dead letters of all stages."""
        return self.dead.total()

    @property
    def dead_share(self) -> float:
        """The share of the tried images that failed; skipped ones were not tried."""
        return self.failed / max(self.detected + self.failed, 1)

    def leave_out(self, kind: str, files: int = 1) -> None:
        """Counts files that are no images; kinds beyond a bound as `other`."""
        self.left_out[kind if kind in self.left_out or len(self.left_out) < _MOST_KINDS else "other"] += files

    def add_detected(self, images: Sequence[DetectedImage], samples: int) -> None:
        """Counts detected images; keeps those that have a thumbnail and may be among the job's `samples` samples."""
        if not images:
            return
        class_names = [name for image in images for name in image.detections.class_names]
        confidences = np.concatenate([image.detections.confidences for image in images])
        self.confidences.update(zip(class_names, confidence_bins(confidences), strict=True))
        self.confidences = bounded(self.confidences)
        self.objects.update(min(len(image.detections), MOST_OBJECTS) for image in images)
        self.outside += mostly_outside(images)
        timings = [image.timing for image in images]
        for timing in timings:
            if timing.led_batch:
                self.batches[timing.led_batch] += 1
                self._add_stage("model", [timing.model])
        for stage in STAGES:
            self._add_stage(stage, [getattr(timing, stage) for timing in timings])
        self.latencies.add([timing.latency for timing in timings])
        for second, count in Counter(int(timing.finished_at) for timing in timings).items():
            self.finished.add(second, count)
        self.began = min(self.began, *(timing.finished_at - timing.latency for timing in timings))
        self.versions.update(image.model_version for image in images)
        self.last = max(self.last, *((image.timing.finished_at, image.model_name, image.model_version) for image in images))
        for image in images:
            if samples and image.thumbnail:
                keep(self.pictures, ranks(image), image, samples)

    def add_dead(self, letter: DeadLetter) -> None:
        """Counts one dead letter."""
        self.dead[letter.stage, letter.reason] += 1
        examples = self.dead_examples.setdefault(letter.reason, [])
        if len(examples) < _EXAMPLES:
            row = _shortened(dead_letter_row(dataclasses.replace(letter, payload=b"")))
            thumbnail = {"thumbnail_base64": base64.b64encode(letter.thumbnail).decode()} if letter.thumbnail else {}
            examples.append({**row, **thumbnail})

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
        self.confidences = bounded(self.confidences)
        for kind, files in other.left_out.items():
            self.leave_out(kind, files)
        for stage, times in other.stages.items():
            self.stages[stage] = self.stages.get(stage, Times()) + times
        for purpose, kept in other.pictures.items():
            for rank, image in kept:
                keep(self.pictures, {purpose: rank}, image, samples)
        for reason, examples in other.dead_examples.items():
            self.dead_examples[reason] = [*self.dead_examples.get(reason, []), *examples][:_EXAMPLES]
        self.began = min(self.began, other.began)
        self.canary = merge_canaries(each for each in (self.canary, other.canary) if each)

    def _add_stage(self, stage: str, seconds: Sequence[float]) -> None:
        self.stages.setdefault(stage, Times()).add(seconds)


def merge_stats(parts: Iterable[JobStats], samples: int) -> JobStats:
    """The statistics of all parts, with what may be one of the job's `samples` samples."""
    merged = JobStats()
    for part in parts:
        merged.merge(part, samples)
    return merged


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What the launcher knows of a run, and the statistics do not.

    Attributes:
      started_at: When the command started, seconds since the epoch.
      ready_at: When the model was loaded and warm, and the work began.
      finished_at: When the results had their final names.
      command: The command line.
      config: All settings, nested.
      mode: `batch` or `streaming`.
      model_path: Where the model was found.
      allowed_batch_sizes: The allowed batch sizes at the end.
      canary: Comparison of the canary with the version in use; None without a canary.
      submitted_at: When the launcher handed the job to a runner with processes of its own. From then to `ready_at` the runner
        queues the job and starts workers, which load the model. 0: all steps ran in the launcher's process.
      model_notes: What a person should know of how the model ran.
    """

    started_at: float
    ready_at: float
    finished_at: float
    command: str
    config: Mapping[str, Any]
    mode: str
    model_path: str
    allowed_batch_sizes: tuple[int, ...] = ()
    canary: CanaryStats | None = None
    submitted_at: float = 0.0
    model_notes: tuple[str, ...] = ()

    def elsewhere(self, began: float) -> RunFacts:
        """The facts of a job that was submitted at `ready_at`.

        Args:
          began: When the first detector of a worker took an image; infinite if none did.
        """
        ready_at = min(max(began, self.ready_at), self.finished_at) if math.isfinite(began) else self.ready_at  # clocks differ
        return dataclasses.replace(self, submitted_at=self.ready_at, ready_at=ready_at)


def summarise(stats: JobStats, facts: RunFacts) -> dict[str, Any]:
    """The content of summary.json."""
    wall = max(facts.finished_at - facts.ready_at, 1e-9)
    return {
        "images": {"read": stats.read, "detected": stats.detected, "dead": stats.failed, "skipped": stats.skipped},
        "skipped_by_kind": dict(stats.left_out.most_common()),
        "done_before": stats.done,
        **({"mended": stats.detected} if facts.config.get("retry_dead") else {}),
        "images_per_second": round(stats.detected / wall, 3),
        "wall_seconds": round(wall, 3),
        "startup_seconds": round((facts.submitted_at or facts.ready_at) - facts.started_at, 3),
        **({"submission_seconds": round(facts.ready_at - facts.submitted_at, 3)} if facts.submitted_at else {}),
        "batch_sizes": {str(size): stats.batches[size] for size in sorted(stats.batches)},
        "stage_seconds": {stage: round(times.total_s, 3) for stage, times in stats.stages.items()},
        "dead_by_reason": _summed((reason, n) for (_, reason), n in stats.dead.items()),
        "dead_by_stage": _summed((stage, n) for (stage, _), n in stats.dead.items()),
        "classes": dict(stats.classes.most_common()),
        "detections": stats.confidences.total(),
        "confidences": confidences_shown(stats.confidences),
        **(
            {"warnings": warnings}
            if (warnings := [*facts.model_notes, *doubts(stats.objects, stats.outside, facts.config)])
            else {}
        ),
        "latency_ms": stats.latencies.percentiles_ms(),
        **({"event_to_publish_ms": stats.publish_latencies.percentiles_ms()} if stats.publish_latencies else {}),
        "throughput": [list(interval) for interval in stats.finished.since_first()],
        "throughput_interval_s": stats.finished.seconds,
        **({"over_time": {"event_to_publish_ms": over_time}} if (over_time := stats.publish_ms.as_dict()) else {}),
        "model": {
            "name": stats.model[0],
            "version": stats.model[1],
            **({"images_by_version": dict(stats.versions)} if len(stats.versions) > 1 else {}),
            "path": with_public_addresses(facts.model_path),
            "allowed_batch_sizes": list(facts.allowed_batch_sizes),
        },
        **({"canary": facts.canary.as_dict()} if facts.canary else {}),
        "config": dict(facts.config),
        "command": facts.command,
        "started_at": _iso(facts.started_at),
        "finished_at": _iso(facts.finished_at),
        "mode": facts.mode,
    }


def left_out_line(kinds: Mapping[str, int]) -> str:
    """How many files of which kinds are no images, for a person.

    >>> left_out_line({".txt": 3, ".json": 1})
    '4 files that are no images (3 .txt, 1 .json)'
    """
    shown = [f"{files} {kind}" for kind, files in Counter(kinds).most_common(_KINDS_SHOWN)]
    more = [f"{len(kinds) - _KINDS_SHOWN} more kinds"] if len(kinds) > _KINDS_SHOWN else []
    return f"{sum(kinds.values())} files that are no images ({', '.join(shown + more)})"


def to_json(summary: Mapping[str, Any]) -> bytes:
    """summary.json's bytes."""
    return row_bytes(summary, indent=2) + b"\n"


def _summed(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The sums by name, the largest first."""
    sums: Counter[str] = Counter()
    for name, count in counts:
        sums[name] += count
    return dict(sums.most_common())


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its long texts cut, at any depth."""
    return {
        key: _shortened(value) if isinstance(value, dict) else _cut(value) if isinstance(value, str) else value
        for key, value in row.items()
    }


def _cut(text: str) -> str:
    return text if len(text) <= _EXAMPLE_CHARACTERS else text[: _EXAMPLE_CHARACTERS - 1] + "…"


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(timespec="seconds")
