"""`ArchiveRows`: the archive of a stream on remote workers, through the runner's durable state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import apache_beam as beam

from pipeline.records import DeadLetter, DetectedImage, dead_letter_row, detection_row, row_bytes
from pipeline.results.completion import UNKNOWN, RowVersion
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.shards import write_shard
from pipeline.stream.archive import WINDOW_ROWS, ArchivedRow, write_rows


@dataclasses.dataclass
class ArchiveRows(beam.PTransform):
    """Writes records as shards, one of each kind every few seconds or 20,000 rows.

    Elements in: `DetectedImage` and `DeadLetter`, in several collections; element out: the path of a shard. Unbounded. At least
    once: a bundle that the runner repeats leaves a second shard, and of rows with the same key the newest counts. For runners
    with durable state; the others have `pipeline.stream.archive`.

    Args:
      folder: Local or `gs://`.
      run: Names the run.
      window_s: Longest time from a shard's first row to its last.
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
        """Wires records, batches of each kind, and writing."""
        parts = tuple(
            part | f"ByKind{n}" >> beam.Map(_with_kind).with_output_types(tuple[str, DetectedImage | DeadLetter])
            for n, part in enumerate(records)
        )
        return (
            parts
            | "FlattenRecords" >> beam.Flatten()
            | "GatherRows" >> beam.GroupIntoBatches(WINDOW_ROWS, self.window_s)
            | "WriteRows" >> beam.FlatMap(self._write).with_output_types(str)
        )

    def _write(self, kind_and_records: tuple[str, Sequence[DetectedImage | DeadLetter]]) -> Iterator[str]:
        rows = [ArchivedRow(record, row_bytes(_row_of(record))) for record in kind_and_records[1]]
        yield from write_rows(rows, self.folder, self.run, self.version, view=self.view, write=write_shard)


def _with_kind(record: DetectedImage | DeadLetter) -> tuple[str, DetectedImage | DeadLetter]:
    return (DETECTIONS if isinstance(record, DetectedImage) else DEAD_LETTERS), dataclasses.replace(record, thumbnail=b"")


def _row_of(record: DetectedImage | DeadLetter) -> dict[str, object]:
    return detection_row(record) if isinstance(record, DetectedImage) else dead_letter_row(record)
