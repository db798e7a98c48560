"""`ArchiveRows`: the archive of a stream on remote workers, through the runner's durable windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import apache_beam as beam
from apache_beam.transforms.trigger import AccumulationMode, AfterCount, AfterWatermark
from apache_beam.transforms.window import FixedWindows, TimestampedValue
from apache_beam.utils.windowed_value import PaneInfo

from pipeline.records import row_bytes
from pipeline.results.completion import UNKNOWN, Provenance
from pipeline.results.layout import archive_name, shard_of, time_in_name
from pipeline.results.ledger import write_index
from pipeline.results.run import Run
from pipeline.storage.files import write_file
from pipeline.stream.run import steady_time

_LATE_SECONDS = 86_400


@dataclasses.dataclass
class ArchiveRows(beam.PTransform):
    """Writes rows as `<folder>/<kind>/<kind>-<window>-<job>-00000-of-0000N.jsonl`, one set of files a window, sorted by image.

    Element in: any record with a `ref`; element out: the names of the files. Unbounded. A file appears complete or not at all,
    and a retried bundle writes the same file again. A row's window is that of its creation, so no row is late: batching loses
    event times, and `ReadMessages` allows for clock skew. If a clock is off by more, rows up to a day late get files of their
    own. For runners that keep open windows durably; `pipeline.stream.archive` is for the others.

    Args:
      folder: Local or `gs://`.
      kind: `detections` or `dead_letters`.
      to_row: Record -> JSON-able row.
      window_s: Length of a window.
      job: Part of the names, so that a restarted job does not overwrite files.
      shards: Files a window.
      provenance: The model and settings that make the rows.
    """

    folder: str
    kind: str
    to_row: Callable[[Any], dict[str, Any]]
    window_s: float
    job: str
    shards: int = 1
    provenance: Provenance = UNKNOWN

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, records: beam.PCollection[Any] | tuple[beam.PCollection[Any], ...]) -> beam.PCollection[str]:
        """Wires rows, windows, grouping by shard, and writing."""
        parts = records if isinstance(records, tuple) else (records,)
        lines = tuple(
            part | f"ToLines{n}" >> beam.Map(self._to_line).with_output_types(tuple[int, bytes]) for n, part in enumerate(parts)
        )
        return (
            (lines[0] if len(lines) == 1 else lines | "FlattenLines" >> beam.Flatten())
            | "Window"
            >> beam.WindowInto(
                FixedWindows(self.window_s),
                trigger=AfterWatermark(late=AfterCount(1)),
                accumulation_mode=AccumulationMode.DISCARDING,
                allowed_lateness=_LATE_SECONDS,
            )
            | "GatherWindow" >> beam.GroupByKey()
            | "WriteWindow" >> beam.Map(self._write)
        )

    def _to_line(self, record: Any) -> TimestampedValue:
        line = row_bytes(self.to_row(record)) + b"\n"
        return TimestampedValue((shard_of(record.ref, self.shards), line), steady_time())

    def _write(
        self,
        shard_and_lines: tuple[int, Iterable[bytes]],
        window: Any = beam.DoFn.WindowParam,
        pane: PaneInfo = beam.DoFn.PaneInfoParam,
    ) -> str:
        shard, lines = shard_and_lines
        job = f"{self.job}{pane.index:04x}" if pane.index > 0 else self.job  # late rows do not overwrite the file
        name = archive_name(self.kind, time_in_name(float(window.start)), job, shard, self.shards)
        write_file(f"{self.folder}/{name}", b"".join(sorted(lines)), Run(self.folder, self.job).folder)
        if self.provenance.settings(self.kind):
            write_index(name, self.folder, self.provenance, Run(self.folder, self.job).folder)
        return f"{self.folder}/{name}"
