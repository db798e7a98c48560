"""`SpoolRows` and `WriteResults`: rows become sorted JSON Lines shards that get their final names all at once, at the end.

Bundles spool rows to a hidden staging folder while they run, so memory stays flat. Each shard is then sorted and written
there, and only when all shards are complete are they renamed. Whatever a killed run leaves lies in staging, where no reader
looks. The same input gives the same files: an image's shard and a row's place in it depend on the image alone.
"""

from __future__ import annotations

import dataclasses
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.transforms.window import GlobalWindows
from apache_beam.utils.windowed_value import WindowedValue

from pipeline.config import WriteConfig
from pipeline.figures.summary import TALLY, Tally, merge_tallies
from pipeline.records import DeadLetter, DetectedImage, row_bytes
from pipeline.storage.files import create, read_file, read_lines
from pipeline.storage.results import DEAD_LETTERS, DETECTIONS, StagedFile, publish, shard_names, shard_of


@dataclasses.dataclass
class SpoolRows(beam.PTransform):
    """Spools one kind of record to staging, and counts it.

    Element in: `DetectedImage` or `DeadLetter`; elements out: (name of a shard, path of a spool) and (`TALLY`, `Tally`), a few a
    bundle. Bounded. A retried bundle leaves only an orphan in staging.

    Args:
      staging: Folder for unfinished files.
      kind: `detections` or `dead_letters`; folder and beginning of the shards' names.
      to_row: Record -> JSON-able row; its first key must be the image, since rows are sorted as text.
      shards: Number of files of this kind.
      samples: How many images with a thumbnail the tally keeps.
    """

    staging: str
    kind: str
    to_row: Callable[[Any], dict[str, Any]]
    shards: int = 1
    samples: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, records: beam.PCollection[Any]) -> beam.PCollection[tuple[str, str | Tally]]:
        """Wires the one DoFn that does it."""
        return records | "Spool" >> beam.ParDo(_Spool(self))


class _Spool(beam.DoFn):
    def __init__(self, settings: SpoolRows):
        self._settings = settings

    def start_bundle(self) -> None:
        self._spools: dict[str, tuple[str, Any]] = {}
        self._tally = Tally()

    def process(self, record: DetectedImage | DeadLetter) -> None:
        settings = self._settings
        if isinstance(record, DetectedImage):
            self._tally.add_detected(record, settings.samples)
        else:
            self._tally.add_dead(record)
        line = row_bytes(settings.to_row(record)) + b"\n"
        shard = shard_names(settings.kind, settings.shards)[shard_of(record.ref, settings.shards)]
        if shard not in self._spools:
            path = f"{settings.staging}/spool/{uuid.uuid4().hex}"
            self._spools[shard] = (path, create(path))
        self._spools[shard][1].write(line)

    def finish_bundle(self) -> Iterator[WindowedValue]:
        for shard, (path, file) in self._spools.items():
            file.close()
            yield GlobalWindows.windowed_value_at_end_of_window((shard, path))
        yield GlobalWindows.windowed_value_at_end_of_window((TALLY, self._tally))


@dataclasses.dataclass
class WriteResults(beam.PTransform):
    """Sorts spooled rows into shards and, when all of them are complete, gives them their final names.

    Elements in: what `SpoolRows` gives, and (`TALLY`, `Tally`) of whatever else was counted; nothing comes out. The job's whole
    `Tally` stays in staging, for `read_tally`.

    Args:
      output: Where the files go.
      staging: Folder for unfinished files.
      write: Which files, and how many.
      samples: How many images with a thumbnail the tally keeps.
    """

    output: str
    staging: str
    write: WriteConfig
    samples: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, parts: tuple[beam.PCollection[tuple[str, str | Tally]], ...]) -> beam.PCollection[None]:
        """Wires two shuffles of file names: one to the shards, one to the end."""
        return (
            parts
            | "AllParts" >> beam.Flatten()
            | "GatherShards" >> beam.GroupByKey()
            | "FinishShards" >> beam.FlatMap(self._finish_shard)
            | "GatherResults" >> beam.GroupByKey()
            | "Publish" >> beam.Map(self._publish)
        )

    def _finish_shard(self, shard_and_parts: tuple[str, Iterable[str | Tally]]) -> Iterator[tuple[str, Tally | StagedFile]]:
        shard, parts = shard_and_parts
        if shard == TALLY:
            yield "", merge_tallies((part for part in parts if isinstance(part, Tally)), self.samples)
        else:
            lines = sorted(line for spool in parts if isinstance(spool, str) for line in read_lines(spool))
            yield from (("", file) for file in self._write_shard(shard, lines))

    def _write_shard(self, shard: str, lines: Sequence[bytes]) -> Iterator[StagedFile]:
        staged = f"{self.staging}/{shard}.jsonl"
        with create(staged) as file:
            for line in lines:
                file.write(line)
        yield StagedFile(staged, shard + ".jsonl")
        if self.write.parquet and shard.startswith(DETECTIONS):
            from pipeline.write.write_parquet import write_parquet

            write_parquet(lines, f"{self.staging}/{shard}.parquet")
            yield StagedFile(f"{self.staging}/{shard}.parquet", shard + ".parquet")

    def _publish(self, results: tuple[str, Iterable[Tally | StagedFile]]) -> None:
        files: list[StagedFile] = []
        tallies: list[Tally] = []
        for result in results[1]:
            (tallies if isinstance(result, Tally) else files).append(result)  # type: ignore[arg-type]
        tally = merge_tallies(tallies, self.samples)
        if tally.read:  # the results of an earlier run outlive one that found no input
            publish(self.output, [*files, *self._missing_files(files)])
        with create(f"{self.staging}/tally") as file:
            file.write(pickle.dumps(tally))

    def _missing_files(self, files: Sequence[StagedFile]) -> Iterator[StagedFile]:
        """Shards that got no row, and what is made of all shards."""
        written = {file.final for file in files}
        wanted = (*shard_names(DETECTIONS, self.write.shards), *shard_names(DEAD_LETTERS, 1))
        missing = [file for shard in wanted if f"{shard}.jsonl" not in written for file in self._write_shard(shard, [])]
        yield from missing
        if self.write.coco:
            from pipeline.write.write_coco import write_coco

            named = [(file.final, file.staged) for file in (*files, *missing)]
            shards = [staged for final, staged in named if final.startswith(DETECTIONS) and final.endswith(".jsonl")]
            yield from (StagedFile(*names) for names in write_coco(shards, self.staging, self.write.coco_ground_truth))


def read_tally(staging: str) -> Tally | None:
    """What a finished job left for its summary; None where it had no input at all."""
    path = f"{staging}/tally"
    if not FileSystems.exists(path):
        return None
    tally: Tally = pickle.loads(read_file(path))  # noqa: S301  written by this very job
    return tally
