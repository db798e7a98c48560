"""`summarise`, which makes the content of summary.json of a job's statistics."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.log_lines import plural
from pipeline.stats.job_stats import BINS, OTHER_CLASSES, JobStats, summed

_KINDS_SHOWN = 8
_SHOWN_CLASSES = 12
_IMAGES_FULL, _IMAGES_EMPTY = 20, 200  # fewer images prove nothing
_SHARE_FULL, _SHARE_OUTSIDE = 0.9, 0.1


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What the launcher of a job knows and the statistics do not; times are seconds since the epoch.

    Attributes:
      started_at: When the program began.
      ready_at: When the model was loaded and warm, and the work began.
      finished_at: When the results had their final names; 0 while the job runs.
      command: The command line.
      config: All settings, nested, as `Config.as_dict` gives them.
      submitted_at: When the launcher handed the job to a runner with processes of its own. From then to `ready_at` the runner
        queues the job and starts workers, which load the model. 0: all steps ran in the launcher's process.
    """

    started_at: float
    ready_at: float
    finished_at: float
    command: str
    config: Mapping[str, Any]
    submitted_at: float = 0.0

    @property
    def streams(self) -> bool:
        """Whether the job is a stream."""
        return bool(self.config["mode"] == "streaming")

    @property
    def is_elsewhere(self) -> bool:
        """Whether the steps run in workers, and not in the launcher's process."""
        return self.submitted_at > 0

    def ready(self, ready_at: float) -> RunFacts:
        """The facts of a job whose model was ready then; an earlier job of this process may have loaded it."""
        return dataclasses.replace(self, ready_at=max(self.started_at, ready_at))

    def ended(self, began: float, finished_at: float) -> RunFacts:
        """The facts of a job that ends.

        Args:
          began: When the first detector took an image; infinite if none did. A job elsewhere was ready then.
          finished_at: When it ends.
        """
        ready_at = self.ready_at
        if self.is_elsewhere:
            ready_at = min(max(began, ready_at), finished_at) if math.isfinite(began) else ready_at  # clocks differ
        return dataclasses.replace(self, ready_at=ready_at, finished_at=finished_at)


def summarise(stats: JobStats, facts: RunFacts) -> dict[str, Any]:
    """The content of summary.json."""
    wall = max(facts.finished_at - facts.ready_at, 1e-9)
    slowest = {"interval_s": stats.publish_ms.seconds, "points": stats.publish_ms.since_first()}
    warnings = [*stats.model_notes, *doubts(stats, facts.config)]
    return {
        "images": {"read": stats.read, "detected": stats.detected, "dead": stats.failed, "skipped": stats.skipped},
        "skipped_by_kind": dict(stats.left_out.most_common()),
        "done_before": stats.done,
        "dead_before": stats.done_dead,
        **({"recovered": stats.detected} if facts.config["retry_dead"] else {}),
        "images_per_second": round(stats.detected / wall, 3),
        "wall_seconds": round(wall, 3),
        "startup_seconds": round((facts.submitted_at if facts.is_elsewhere else facts.ready_at) - facts.started_at, 3),
        **({"submission_seconds": round(facts.ready_at - facts.submitted_at, 3)} if facts.is_elsewhere else {}),
        "batch_sizes": {str(size): stats.batches[size] for size in sorted(stats.batches)},
        "stage_seconds": {stage: round(times.total_s, 3) for stage, times in stats.stages.items()},
        "dead_by_reason": dict(stats.dead_by_reason.most_common()),
        "dead_by_stage": dict(summed((stage, n) for (stage, _), n in stats.dead.items()).most_common()),
        "classes": dict(stats.classes.most_common()),
        "detections": stats.confidences.total(),
        "confidences": confidences_of(stats),
        **({"warnings": warnings} if warnings else {}),
        "latency_ms": stats.latencies.percentiles_ms(),
        **({"event_to_publish_ms": stats.publish_latencies.percentiles_ms()} if stats.publish_latencies else {}),
        "throughput": [list(interval) for interval in stats.finished.since_first()],
        "throughput_interval_s": stats.finished.seconds,
        **({"over_time": {"event_to_publish_ms": slowest}} if slowest["points"] else {}),
        "model": {
            "name": stats.model[0],
            "version": stats.model[1],
            **({"images_by_version": dict(stats.versions)} if len(stats.versions) > 1 else {}),
            "path": facts.config["model"]["path"],
            "allowed_batch_sizes": list(stats.batch_sizes),
            "class_names": list(stats.class_names),
        },
        **({"canary": stats.canary.as_dict()} if stats.canary else {}),
        "config": dict(facts.config),
        "command": facts.command,
        "started_at": _iso(facts.started_at),
        "finished_at": _iso(facts.finished_at),
        "mode": facts.config["mode"],
    }


def doubts(stats: JobStats, config: Mapping[str, Any]) -> Iterator[str]:
    """Signs of a model that is described wrongly, a line each with the settings that may cause it."""
    images, total = stats.objects.total(), sum(number * amount for number, amount in stats.objects.items())
    most = config["detect"]["max_detections"]
    full = stats.objects[most]
    if images >= _IMAGES_FULL and full >= _SHARE_FULL * images:
        yield f"{full} of {images} images have {plural(most, 'object')}, the most allowed; see max_detections and score_threshold"
    if stats.outside and stats.outside >= _SHARE_OUTSIDE * total:
        where = "lie for the most part outside of their images; see model.box_format, model.box_units and model.resize"
        yield f"{stats.outside} of {total} boxes {where}"
    if images >= _IMAGES_EMPTY and not total:
        yield f"none of {images} images has an object; see score_threshold, model.value_range and model.box_units"


def left_out_line(kinds: Mapping[str, int]) -> str:
    """How many files of which kinds are no images, for a person.

    >>> left_out_line({".txt": 3, ".json": 1})
    '4 files that are no images (3 .txt, 1 .json)'
    >>> left_out_line({".txt": 1})
    '1 file that is no image (1 .txt)'
    """
    shown = [f"{files} {kind}" for kind, files in Counter(kinds).most_common(_KINDS_SHOWN)]
    more = [plural(len(kinds) - _KINDS_SHOWN, "more kind")] if len(kinds) > _KINDS_SHOWN else []
    files = sum(kinds.values())
    return f"{plural(files, 'file')} that {'is no image' if files == 1 else 'are no images'} ({', '.join(shown + more)})"


def confidences_of(stats: JobStats) -> dict[str, Any]:
    """Detections by bin, of all classes and of the most frequent ones."""
    named = Counter({name: amount for name, amount in stats.classes.items() if name != OTHER_CLASSES})
    everything = [0] * BINS
    for (_, number), amount in stats.confidences.items():
        everything[number] += amount
    rows = {name: [stats.confidences[name, n] for n in range(BINS)] for name, _ in named.most_common(_SHOWN_CLASSES)}
    return {"all": everything, "by_class": rows}


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(timespec="seconds")
