"""The figures of a job: counted from the records themselves, so that they add up whatever was retried."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.records import DeadLetter, DetectedImage, dead_letter_row, identity_hash, row_bytes
from pipeline.stats.canary import CanaryStats
from pipeline.stats.histogram import Intervals, Latencies, latency_bucket, percentiles_ms
from pipeline.stats.metrics import STAGES

_EXAMPLES = 20  # dead letters kept for the report, for each reason
_EXAMPLE_CHARACTERS = 1000  # of each text in one: a message may name a URI of megabytes
_MOST_KINDS = 100  # endings of files that are no images
_KINDS_SAID = 8
_MOST_CLASSES = 5000  # COCO has 80 classes, Open Images 601, LVIS 1,203
OTHER_CLASSES = "(other classes)"


@dataclasses.dataclass
class JobStats:
    """Counts of images seen so far; two of them add up to one of both, and none grows with the number of images.

    Attributes:
      read: Images listed.
      skipped: Images listed more than once, or not wanted, or done before; and files listed that are no images.
      left_out: Of these, the files that are no images, by kind.
      done: Of these, the ones that an earlier run or a stream has done.
      resumed: Of the `detected` and the `dead` those that a killed run of the same command has left.
      dead: Dead letters by (stage, reason).
      classes: Detections by class name; of a model with thousands of names, the rare ones together as `OTHER_CLASSES`.
      batches: Device batches by rung.
      stage_seconds: Seconds by stage, summed over images; stages of different images overlap.
      latencies: Images by `latency_bucket`, from being in hand to the result.
      publish_latencies: Of streams the same, from an image's event time to its publishing.
      finished: Detected images by the time of their result.
      samples: The detected images with a thumbnail that have the smallest ranks.
      ranks_below: Only samples of smaller ranks are kept, since others have enough of these.
      dead_examples: A few dead letters of each reason, as rows.
      versions: Images by the model's version.
      last: (when, name, version) of the model last seen.
      began: When a detector took the first of the detected images, seconds since the epoch.
    """

    read: int = 0
    skipped: int = 0
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)
    done: int = 0
    resumed: Counter[str] = dataclasses.field(default_factory=Counter)
    dead: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    classes: Counter[str] = dataclasses.field(default_factory=Counter)
    batches: Counter[int] = dataclasses.field(default_factory=Counter)
    stage_seconds: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    latencies: Latencies = dataclasses.field(default_factory=Counter)
    publish_latencies: Latencies = dataclasses.field(default_factory=Counter)
    finished: Intervals = dataclasses.field(default_factory=Intervals)
    samples: list[tuple[int, DetectedImage]] = dataclasses.field(default_factory=list)
    ranks_below: float = math.inf
    dead_examples: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    versions: Counter[str] = dataclasses.field(default_factory=Counter)
    last: tuple[float, str, str] = (0.0, "", "")
    began: float = math.inf

    @property
    def model(self) -> tuple[str, str]:
        """(name, version) of the model last seen."""
        return self.last[1:]

    @property
    def named(self) -> int:
        """Images listed, without the files that are none."""
        return self.read - sum(self.left_out.values())

    @property
    def detected(self) -> int:
        """Images with a result."""
        return sum(self.latencies.values())

    def leave_out(self, kind: str, files: int = 1) -> None:
        """Counts files that are no images; kinds beyond a bound as `other`."""
        self.left_out[kind if kind in self.left_out or len(self.left_out) < _MOST_KINDS else "other"] += files

    def add_detected(self, image: DetectedImage, samples: int) -> None:
        """Counts one detected image."""
        self.classes.update(image.detections.class_names)
        self._bound_classes()
        timing = image.timing
        if timing.led_batch:
            self.batches[timing.led_batch] += 1
            self.stage_seconds["model"] += timing.model
        for stage in STAGES:
            self.stage_seconds[stage] += getattr(timing, stage)
        self.latencies[latency_bucket(timing.latency * 1e3)] += 1
        self.finished.add(timing.finished_at)
        self.began = min(self.began, timing.finished_at - timing.latency)
        self.versions[image.model_version] += 1
        self.last = max(self.last, (timing.finished_at, image.model_name, image.model_version))
        rank = identity_hash(image.ref.identity)
        if image.thumbnail and rank < self.ranks_below:
            self.samples = _smallest([*self.samples, (rank, image)], samples)

    def add_dead(self, letter: DeadLetter) -> None:
        """Counts one dead letter."""
        self.dead[letter.stage, letter.reason] += 1
        examples = self.dead_examples.setdefault(letter.reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(_shortened(dead_letter_row(dataclasses.replace(letter, payload=b""))))

    def as_resumed(self) -> JobStats:
        """The same, of a killed run whose rows this one has."""
        return dataclasses.replace(self, resumed=Counter(detected=self.detected, dead=sum(self.dead.values())))

    def merge(self, other: JobStats, samples: int) -> None:
        """Adds another stats to this one."""
        self.read += other.read
        self.skipped += other.skipped
        self.done += other.done
        for name in ("resumed", "dead", "classes", "batches", "latencies", "publish_latencies", "versions"):
            getattr(self, name).update(getattr(other, name))
        for kind, files in other.left_out.items():
            self.leave_out(kind, files)
        self._bound_classes()
        self.finished.merge(other.finished)
        for stage, seconds in other.stage_seconds.items():
            self.stage_seconds[stage] += seconds
        self.samples = _smallest([*self.samples, *other.samples], samples)
        for reason, examples in other.dead_examples.items():
            self.dead_examples[reason] = [*self.dead_examples.get(reason, []), *examples][:_EXAMPLES]
        self.last = max(self.last, other.last)
        self.began = min(self.began, other.began)

    def _bound_classes(self) -> None:
        if len(self.classes) > 2 * _MOST_CLASSES:
            detections = sum(self.classes.values())
            self.classes.pop(OTHER_CLASSES, None)
            self.classes = Counter(dict(self.classes.most_common(_MOST_CLASSES)))
            self.classes[OTHER_CLASSES] = detections - sum(self.classes.values())


def merge_stats(job_stats: Iterable[JobStats], samples: int) -> JobStats:
    """One stats of all, with the `samples` images of the smallest ranks."""
    merged = JobStats()
    for stats in job_stats:
        merged.merge(stats, samples)
    return merged


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What the launcher knows of a run and the records do not.

    Attributes:
      started_at: Seconds since the epoch at which the command started.
      ready_at: When the model was loaded and warm, and the work began.
      finished_at: When the results stood under their final names.
      command: The command line.
      config: All settings, nested.
      mode: `batch` or `streaming`.
      model_path: Where the model was found.
      allowed_batch_sizes: The rungs in use at the end.
      canary: What a canary has shown; None where there was none.
      submitted_at: When a job that works in other processes was handed to its runner; what is between that and `ready_at` is
        the runner's: its queue, its workers' start, their loading the model. 0: all was in the launcher's process.
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

    def elsewhere(self, began: float) -> RunFacts:
        """The same of a job that was submitted at `ready_at`.

        Args:
          began: When the first of its workers' detectors took an image; infinite where none did.
        """
        ready_at = min(max(began, self.ready_at), self.finished_at) if math.isfinite(began) else self.ready_at  # clocks differ
        return dataclasses.replace(self, submitted_at=self.ready_at, ready_at=ready_at)


def summarise(stats: JobStats, facts: RunFacts) -> dict[str, Any]:
    """The content of summary.json."""
    wall = max(facts.finished_at - facts.ready_at, 1e-9)
    dead = sum(stats.dead.values())
    by_reason: Counter[str] = Counter()
    by_stage: Counter[str] = Counter()
    for (stage, reason), n in stats.dead.items():
        by_stage[stage] += n
        by_reason[reason] += n
    return {
        "images": {"read": stats.read, "detected": stats.detected, "dead": dead, "skipped": stats.skipped},
        "skipped_by_kind": dict(stats.left_out.most_common()),
        "done_before": stats.done,
        "resumed": sum(stats.resumed.values()),
        **({"mended": stats.detected} if facts.config.get("retry_dead") else {}),
        "images_per_second": round((stats.detected - stats.resumed["detected"]) / wall, 3),
        "wall_seconds": round(wall, 3),
        "startup_seconds": round((facts.submitted_at or facts.ready_at) - facts.started_at, 3),
        **({"submission_seconds": round(facts.ready_at - facts.submitted_at, 3)} if facts.submitted_at else {}),
        "batch_sizes": {str(size): stats.batches[size] for size in sorted(stats.batches)},
        "stage_seconds": {stage: round(seconds, 3) for stage, seconds in stats.stage_seconds.items()},
        "dead_by_reason": dict(by_reason.most_common()),
        "dead_by_stage": dict(by_stage.most_common()),
        "classes": dict(stats.classes.most_common()),
        "detections": sum(stats.classes.values()),
        "latency_ms": percentiles_ms(stats.latencies),
        **({"event_to_publish_ms": percentiles_ms(stats.publish_latencies)} if stats.publish_latencies else {}),
        "throughput": [list(interval) for interval in stats.finished.since_first()],
        "throughput_interval_s": stats.finished.seconds,
        "model": {
            "name": stats.model[0],
            "version": stats.model[1],
            **({"images_by_version": dict(stats.versions)} if len(stats.versions) > 1 else {}),
            "path": facts.model_path,
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
    said = [f"{files} {kind}" for kind, files in Counter(kinds).most_common(_KINDS_SAID)]
    more = [f"{len(kinds) - _KINDS_SAID} more kinds"] if len(kinds) > _KINDS_SAID else []
    return f"{sum(kinds.values())} files that are no images ({', '.join(said + more)})"


def to_json(summary: Mapping[str, Any]) -> bytes:
    """summary.json's bytes."""
    return row_bytes(summary, indent=2) + b"\n"


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its long texts cut, however deep they stand."""
    return {
        key: _shortened(value) if isinstance(value, dict) else _cut(value) if isinstance(value, str) else value
        for key, value in row.items()
    }


def _cut(text: str) -> str:
    return text if len(text) <= _EXAMPLE_CHARACTERS else text[: _EXAMPLE_CHARACTERS - 1] + "…"


def _smallest(samples: list[tuple[int, DetectedImage]], size: int) -> list[tuple[int, DetectedImage]]:
    return sorted(samples, key=lambda sample: sample[0])[:size]


def _iso(seconds: float) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(timespec="seconds")
