"""`SpillRows`: records become rows in sorted spill files, which are the run's resume points if it makes any."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, NamedTuple

import apache_beam as beam
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.window import GlobalWindows

from pipeline.records import DeadLetter, DetectedImage, row_bytes
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, shard_of
from pipeline.results.renewal import renewed
from pipeline.results.resume_points import CHECKPOINT, SPILLS, ResumePoint, footer_of
from pipeline.stats.summary import JobStats
from pipeline.stats.worker_context import WorkerContext
from pipeline.storage.files import folders_of, sync
from pipeline.storage.spill_files import KeyedSpills, SpillFile, SpillWriter

_MOST_SHARDS = 100_000_000
BY_ROWS = 0  # a number of shards: as many as the rows need


class Shard(NamedTuple):
    """A file of rows to be written: `number` of `shards`, or all files of its kind if `shards` is `BY_ROWS`."""

    kind: Annotated[str, (DETECTIONS, DEAD_LETTERS).__contains__]
    number: Annotated[int, range(_MOST_SHARDS).__contains__]
    shards: Annotated[int, range(_MOST_SHARDS).__contains__]


RowsResumePoint = ResumePoint[Shard, JobStats]


class Spilled(NamedTuple):
    """The outputs of `SpillRows`: sorted spills, a few for each bundle, and statistics."""

    spills: beam.PCollection[tuple[Shard, SpillFile]]
    job_stats: beam.PCollection[JobStats]


@dataclasses.dataclass
class SpillRows(beam.PTransform):
    """Writes one kind of record to sorted spill files in the run's folder, and counts the records.

    Element in: `DetectedImage` or `DeadLetter`; out: `Spilled`. Bounded. A retried bundle leaves an unused file.

    Args:
      staging: The run's folder of unfinished files.
      kind: `detections` or `dead_letters`.
      to_row: Record -> JSON-able row; its first key must be the image, since rows are sorted as text.
      shards: Number of files of this kind, over which images are spread by their identity; 0: as many as the rows need.
      samples: How many samples the job wants.
      resume_point_s: Seconds between resume points; None: the run makes none.
      worker_context: What workers elsewhere must reach before they begin.
      spill_bytes: Bytes of rows that a bundle holds in memory; 0: the default of `SpillWriter`.
    """

    staging: str
    kind: str
    to_row: Callable[[Any], dict[str, Any]]
    shards: int = BY_ROWS
    samples: int = 0
    resume_point_s: float | None = None
    worker_context: WorkerContext | None = None
    spill_bytes: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, records: beam.PCollection[Any]) -> Spilled:
        """Wires the one DoFn that does it."""
        spilled = records | "SpillFile" >> beam.ParDo(_SpillRows(dataclasses.replace(self))).with_outputs(
            "job_stats", main="spills"
        )
        return Spilled(spilled.spills, spilled.job_stats)


class _SpillRows(beam.DoFn):
    def __init__(self, settings: SpillRows):
        self._settings = settings

    def setup(self) -> None:
        if self._settings.worker_context:
            self._settings.worker_context.check_worker()

    def start_bundle(self) -> None:
        folder, resume_point_s = f"{self._settings.staging}/{SPILLS}", self._settings.resume_point_s
        makes_points = () if resume_point_s is None else (CHECKPOINT, self._footer)
        self._spiller = SpillWriter(folder, self._settings.spill_bytes, *makes_points)
        self._complete: list[Any] = []
        self._failed: Exception | None = None
        self._lock = threading.Lock()
        self._begin()
        self._renewed = contextlib.ExitStack()
        if resume_point_s:  # records come in bursts, and the last one must not wait for the next
            self._renewed.enter_context(renewed("resume-point", resume_point_s / 2, self._flush_in_time))

    def process(self, record: DetectedImage | DeadLetter) -> list[Any]:
        settings = self._settings
        number = shard_of(record.ref, settings.shards) if settings.shards else 0
        line = row_bytes(settings.to_row(record)) + b"\n"
        with self._lock:
            if isinstance(record, DetectedImage):
                self._stats.add_detected(record, settings.samples)
            else:
                self._stats.add_dead(record)
            self._take(self._spiller.add(Shard(settings.kind, number, settings.shards), line))
            if settings.resume_point_s is not None and self._age_s() >= settings.resume_point_s:
                self._take(self._spiller.flush())
            return self._given()

    def finish_bundle(self) -> Iterator[Any]:
        self._renewed.close()
        if not self._failed:
            self._take(self._spiller.flush())
        for result in self._given():
            tag, value = (result.tag, result.value) if isinstance(result, TaggedOutput) else ("", result)
            windowed = GlobalWindows.windowed_value_at_end_of_window(value)
            yield TaggedOutput(tag, windowed) if tag else windowed

    def _begin(self) -> None:
        self._stats = JobStats()
        self._started_at = time.monotonic()

    def _age_s(self) -> float:
        return time.monotonic() - self._started_at

    def _flush_in_time(self) -> bool:
        with self._lock:
            try:
                if self._age_s() >= (self._settings.resume_point_s or 0.0) / 2:
                    self._take(self._spiller.flush())
            except Exception as err:  # noqa: BLE001  any error fails the bundle
                self._failed = err
        return self._failed is None

    def _take(self, spills: Iterable[tuple[Shard, SpillFile]]) -> None:
        """Keeps complete spills, to be passed on with their statistics; does nothing if there are none."""
        complete = list(spills)
        if complete:
            if self._settings.resume_point_s is not None:  # else no run resumes from them
                paths = [spill.path for _, spill in complete]
                sync([*paths, *folders_of(paths)])
            self._complete += [*complete, TaggedOutput("job_stats", self._stats)]
            self._begin()

    def _given(self) -> list[Any]:
        """The outputs since the last call."""
        if self._failed:
            raise self._failed
        given, self._complete = self._complete, []
        return given

    def _footer(self, spills: KeyedSpills) -> bytes:
        return footer_of(ResumePoint(tuple(spills), self._stats))
