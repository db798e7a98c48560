"""`SpillRows`: records become rows in sorted spills, which are resume points of the run where it makes some."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, NamedTuple

import apache_beam as beam
from apache_beam.pvalue import AsSingleton, TaggedOutput
from apache_beam.transforms.window import GlobalWindows

from pipeline.records import DeadLetter, DetectedImage, row_bytes
from pipeline.stats.samples import rank_bound
from pipeline.stats.summary import JobStats
from pipeline.stats.worker_context import WorkerContext
from pipeline.storage.files import folders_of, sync
from pipeline.storage.renewal import renewed
from pipeline.storage.results import DEAD_LETTERS, DETECTIONS, shard_of
from pipeline.storage.resume_points import CHECKPOINT, SPOOLS, ResumePoint, footer_of
from pipeline.storage.spill_files import KeyedSpills, SpillFile, SpillWriter

_MOST_SHARDS = 100_000_000
BY_ROWS = 0  # number of shards of a kind whose shards are counted once its rows are


class Shard(NamedTuple):
    """A file of rows to be: `number` of `shards`, or all files of its kind where `shards` is `BY_ROWS`."""

    kind: Annotated[str, (DETECTIONS, DEAD_LETTERS).__contains__]
    number: Annotated[int, range(_MOST_SHARDS).__contains__]
    shards: Annotated[int, range(_MOST_SHARDS).__contains__]


RowsResumePoint = ResumePoint[Shard, JobStats]


class Spilled(NamedTuple):
    """The outputs of `SpillRows`: sorted spills, a few a bundle, and what was counted."""

    spills: beam.PCollection[tuple[Shard, SpillFile]]
    job_stats: beam.PCollection[JobStats]


@dataclasses.dataclass
class SpillRows(beam.PTransform):
    """Writes one kind of record to sorted spills in staging, and counts it.

    Element in: `DetectedImage` or `DeadLetter`; out: `Spilled`. Bounded. A retried bundle leaves only an orphan in staging.

    Args:
      staging: Folder for unfinished files.
      kind: `detections` or `dead_letters`.
      to_row: Record -> JSON-able row; its first key must be the image, since rows are sorted as text.
      shards: Number of files of this kind, over which images are spread by their identity; 0: as many as the rows need.
      samples: How many images with a thumbnail the statistics keep.
      resume_point_s: Seconds between checkpoints; None: none are made.
      worker_context: What workers elsewhere must reach before they begin.
      expected: Of one number, about how many records there are in the whole job; with it, only so many of them travel with their
        thumbnails as the job may keep, however many bundles there are.
    """

    staging: str
    kind: str
    to_row: Callable[[Any], dict[str, Any]]
    shards: int = BY_ROWS
    samples: int = 0
    resume_point_s: float | None = None
    worker_context: WorkerContext | None = None
    expected: tuple[beam.PCollection[int], ...] = ()

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, records: beam.PCollection[Any]) -> Spilled:
        """Wires the one DoFn that does it."""
        spill = _Spool(dataclasses.replace(self, expected=()))  # what the workers get has no part of the graph
        expected = (AsSingleton(number, 0) for number in self.expected)
        spilled = records | "SpillFile" >> beam.ParDo(spill, *expected).with_outputs("job_stats", main="spills")
        return Spilled(spilled.spills, spilled.job_stats)


class _Spool(beam.DoFn):
    def __init__(self, settings: SpillRows):
        self._settings = settings

    def setup(self) -> None:
        if self._settings.worker_context:
            self._settings.worker_context.check_worker()

    def start_bundle(self) -> None:
        folder, resume_point_s = f"{self._settings.staging}/{SPOOLS}", self._settings.resume_point_s
        self._spiller = SpillWriter(folder) if resume_point_s is None else SpillWriter(folder, 0, CHECKPOINT, self._footer)
        self._complete: list[Any] = []
        self._failed: Exception | None = None
        self._lock = threading.Lock()
        self._ranks: list[int] = []  # of the samples so far, the smallest
        self._begin()
        self._renewed = contextlib.ExitStack()
        if resume_point_s:  # records come in bursts, and what came last must not wait for the next one
            self._renewed.enter_context(renewed("resume-point", resume_point_s / 2, self._flush_in_time))

    def process(self, record: DetectedImage | DeadLetter, expected: int = 0) -> list[Any]:
        settings = self._settings
        number = shard_of(record.ref, settings.shards) if settings.shards else 0
        line = row_bytes(settings.to_row(record)) + b"\n"
        with self._lock:
            if isinstance(record, DetectedImage):
                self._tally.ranks_below = min(self._tally.ranks_below, rank_bound(settings.samples, expected))
                self._tally.add_detected(record, settings.samples)
            else:
                self._tally.add_dead(record)
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
        # else a checkpoint every few seconds would have as many samples as the whole job has
        full = len(self._ranks) == self._settings.samples
        self._tally = JobStats(ranks_below=self._ranks[-1] if full and self._ranks else math.inf)
        self._begun_at = time.monotonic()

    def _age_s(self) -> float:
        return time.monotonic() - self._begun_at

    def _flush_in_time(self) -> bool:
        with self._lock:
            try:
                if self._age_s() >= (self._settings.resume_point_s or 0.0) / 2:
                    self._take(self._spiller.flush())
            except Exception as err:  # noqa: BLE001  whatever it is, the bundle fails for it
                self._failed = err
        return self._failed is None

    def _take(self, spills: Iterable[tuple[Shard, SpillFile]]) -> None:
        """Keeps spills that are complete now, to be passed on with what was counted of them; with none, does nothing."""
        complete = list(spills)
        if complete:
            if self._settings.resume_point_s is not None:  # else nobody goes on from them
                paths = [spill.path for _, spill in complete]
                sync([*paths, *folders_of(paths)])
            self._complete += [*complete, TaggedOutput("job_stats", self._tally)]
            self._ranks = sorted([*self._ranks, *(rank for rank, _ in self._tally.samples)])[: self._settings.samples]
            self._begin()

    def _given(self) -> list[Any]:
        """What is to be passed on."""
        if self._failed:
            raise self._failed
        given, self._complete = self._complete, []
        return given

    def _footer(self, spills: KeyedSpills) -> bytes:
        return footer_of(ResumePoint(tuple(spills), self._tally))
