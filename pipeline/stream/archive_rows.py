"""`ArchiveRows`: the archive of a stream on remote workers, through the runner's durable windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import apache_beam as beam
from apache_beam.transforms.trigger import AccumulationMode, AfterCount, AfterWatermark
from apache_beam.transforms.window import FixedWindows, TimestampedValue

from pipeline.records import DeadLetter, DetectedImage, dead_letter_row, detection_row, row_bytes
from pipeline.results.completion import UNKNOWN, RowVersion
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.shards import write_shard
from pipeline.stream.archive import ArchivedRow, by_kind
from pipeline.stream.run import steady_time

_LATE_SECONDS = 86_400


@dataclasses.dataclass
class ArchiveRows(beam.PTransform):
    """Writes records as shards, one of each kind and window.

    Elements in: `DetectedImage` and `DeadLetter`, in several collections; element out: the path of a shard. Unbounded. At least
    once: a bundle that the runner repeats leaves a second shard, and of rows with the same key the newest counts. A row's window
    is that of its creation, so no row is late: batching loses event times, and `ReadMessages` allows for clock skew. If a clock
    is off by more, rows up to a day late get shards of their own. For runners that keep open windows durably; the others have
    `pipeline.stream.archive`.

    Args:
      folder: Local or `gs://`.
      run: Names the run.
      window_s: Length of a window.
      version: By what the rows are made.
      view: Whether each shard has a view for people.
    """

    folder: str
    run: str
    window_s: float
    version: RowVersion = UNKNOWN
    view: bool = True

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, records: tuple[beam.PCollection[DetectedImage | DeadLetter], ...]) -> beam.PCollection[str]:
        """Wires records, windows, grouping by kind, and writing."""
        parts = tuple(
            part | f"ByKind{n}" >> beam.Map(_with_kind).with_output_types(tuple[str, DetectedImage | DeadLetter])
            for n, part in enumerate(records)
        )
        return (
            parts
            | "FlattenRecords" >> beam.Flatten()
            | "Window"
            >> beam.WindowInto(
                FixedWindows(self.window_s),
                trigger=AfterWatermark(late=AfterCount(1)),
                accumulation_mode=AccumulationMode.DISCARDING,
                allowed_lateness=_LATE_SECONDS,
            )
            | "GatherWindow" >> beam.GroupByKey()
            | "WriteWindow" >> beam.FlatMap(self._write).with_output_types(str)
        )

    def _write(self, kind_and_records: tuple[str, Iterable[DetectedImage | DeadLetter]]) -> Iterator[str]:
        rows = [ArchivedRow(record, row_bytes(_row_of(record))) for record in kind_and_records[1]]
        for kind, table, lines in by_kind(rows, self.version, self.run):
            yield write_shard(self.folder, kind, table, self.run, lines if self.view else None)


def _with_kind(record: DetectedImage | DeadLetter) -> TimestampedValue:
    kind = DETECTIONS if isinstance(record, DetectedImage) else DEAD_LETTERS
    return TimestampedValue((kind, dataclasses.replace(record, thumbnail=b"")), steady_time())


def _row_of(record: DetectedImage | DeadLetter) -> dict[str, object]:
    return detection_row(record) if isinstance(record, DetectedImage) else dead_letter_row(record)
