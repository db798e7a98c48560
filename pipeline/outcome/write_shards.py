"""`WriteShards`: results become rows of shards, which are only ever added to a results folder.

A bundle writes a shard every few seconds or rows, so rows appear while the job runs, and a killed job repeats little. Records
become columns a thousand at a time: a shard's worth at once would let the model wait. A bundle that a runner repeats finds the
shards of its first attempt, or adds rows of the same keys, of which the newest count.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import apache_beam as beam
import pyarrow as pa
from apache_beam.transforms.window import GlobalWindows

from pipeline.config import WriteConfig
from pipeline.records import DeadLetter, DetectedImage
from pipeline.results.completion import RowVersion
from pipeline.results.rows import record_bytes, rows_by_kind
from pipeline.results.run_folder import Run
from pipeline.results.shards import add_rows
from pipeline.stats.job_stats import JobStats, merge_stats
from pipeline.worker import WorkerContext

_MOST_BYTES = 48_000_000  # of the records that a bundle holds, estimated
_AT_ONCE = 1000  # records


class Results(NamedTuple):
    """All results of a job: `read = detected + dead + skipped`.

    Attributes:
      detected: The images with a result.
      dead: The images without one, by the step that failed; separate, since flattening them would break fused steps up.
      counted: Statistics beside the records: images read and skipped.
    """

    detected: beam.PCollection[DetectedImage]
    dead: tuple[beam.PCollection[DeadLetter], ...]
    counted: beam.PCollection[JobStats]


@dataclasses.dataclass
class WriteShards(beam.PTransform):
    """Writes results as shards.

    Bounded: a bundle holds 48 MB of records at most. At least once where the runner retries bundles, and then of equal rows the
    newest counts. Out: the statistics of all rows, one element.

    Args:
      run: The run.
      version: The version of its rows.
      write: Which files.
      samples: How many samples the job wants.
      worker_context: What workers elsewhere must reach before they begin; None: the launcher's process does all work.
    """

    run: Run
    version: RowVersion
    write: WriteConfig = dataclasses.field(default_factory=WriteConfig)
    samples: int = 0
    worker_context: WorkerContext | None = None

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, results: Results) -> beam.PCollection[JobStats]:
        """Wires the writing and the statistics."""
        written = [results.detected | "WriteDetections" >> self._writing()]
        written += [dead | f"WriteDeadLetters{n}" >> self._writing() for n, dead in enumerate(results.dead)]
        stats = [results.counted, *written] | "AllStats" >> beam.Flatten()
        return stats | "MergeStats" >> beam.CombineGlobally(functools.partial(merge_stats, samples=self.samples))

    def _writing(self) -> Any:
        return beam.ParDo(_WriteRows(dataclasses.replace(self)))


class _WriteRows(beam.DoFn):
    """Writes records; outputs the statistics of those whose rows are there."""

    def __init__(self, sink: WriteShards):
        self._sink = sink

    def setup(self) -> None:
        if self._sink.worker_context:
            self._sink.worker_context.check_worker()

    def start_bundle(self) -> None:
        self._records: list[Any] = []
        self._tables: defaultdict[str, list[pa.Table]] = defaultdict(list)  # of earlier records, by the kind of rows
        self._stats = JobStats()
        self._held_bytes, self._began = 0, time.monotonic()

    def process(self, record: DetectedImage | DeadLetter) -> Iterator[Any]:
        self._held_bytes += record_bytes(record) + len(record.thumbnail)
        self._records.append(record)
        if len(self._records) >= _AT_ONCE:
            self._make_columns()
        is_late = time.monotonic() - self._began >= self._sink.write.shard_seconds
        if is_late or self._held_bytes >= _MOST_BYTES:
            yield from self._flush()

    def finish_bundle(self) -> Iterator[Any]:
        return self._flush(GlobalWindows.windowed_value_at_end_of_window)

    def _make_columns(self) -> None:
        self._stats.add_detected([each for each in self._records if isinstance(each, DetectedImage)], self._sink.samples)
        for letter in self._records:
            if isinstance(letter, DeadLetter):
                self._stats.add_dead(letter)
        for kind, table in rows_by_kind(self._records, self._sink.version, self._sink.run.name):
            self._tables[kind].append(table)
        self._records = []

    def _flush(self, windowed: Callable[[Any], Any] = lambda value: value) -> Iterator[Any]:
        """Writes what is held as a shard."""
        self._make_columns()
        if not self._tables:
            return
        for kind, tables in self._tables.items():
            add_rows(self._sink.run, kind, pa.concat_tables(tables))
        yield windowed(self._stats)
        self.start_bundle()
