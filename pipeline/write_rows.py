"""`WriteRows` and `PublishFiles`: rows become sorted JSON Lines shards that get their final names all at once, at the end.

Bundles spool rows to a hidden staging folder while they run, so memory stays flat. Each shard is then sorted and written
there, and only when all shards are complete are they renamed. Whatever a killed run leaves lies in staging, where no reader
looks. The same input gives the same files: an image's shard and a row's place in it depend on the image alone.
"""

from __future__ import annotations

import dataclasses
import json
import posixpath
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from pipeline.errors import OutputError
from pipeline.globs import escape_glob
from pipeline.sampling import sample_rank

STAGING = ".staging-"
_TEXT = "uncompressed"  # Beam would gzip by a file's ending otherwise


class StagedFile(NamedTuple):
    """A complete file in staging and the name it will have."""

    staged: str
    final: str


@dataclasses.dataclass
class WriteRows(beam.PTransform):
    """Writes one kind of record as `<output>/<kind>/<kind>-00000-of-0000N.jsonl`, sorted by image.

    Element in: any record; elements out: `StagedFile`s. Bounded. A retried bundle leaves only an orphan in staging.

    Args:
      staging: Folder for unfinished files.
      kind: `detections` or `dead_letters`; folder and beginning of the names.
      to_row: Record -> JSON-able row; its first key must be the image, since rows are sorted as text.
      shards: Number of files.
      parquet: Write each shard as Parquet too.
    """

    staging: str
    kind: str
    to_row: Callable[[Any], dict[str, Any]]
    shards: int = 1
    parquet: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, records: beam.PCollection[Any]) -> beam.PCollection[StagedFile]:
        """Wires spooling, grouping by shard, and sorting; each shard becomes a file, also an empty one."""
        spooled = records | "SpoolRows" >> beam.ParDo(SpoolRows(self.staging, self.kind, self.to_row, self.shards))
        every_shard = records.pipeline | "EveryShard" >> beam.Create([(shard, "") for shard in range(self.shards)])
        return (
            (spooled, every_shard)
            | "FlattenShards" >> beam.Flatten()
            | "GatherShards" >> beam.GroupByKey()
            | "SortShards" >> beam.FlatMap(self._sort_shard)
        )

    def _sort_shard(self, shard_and_spools: tuple[int, Iterable[str]]) -> Iterator[StagedFile]:
        shard, spools = shard_and_spools
        lines = sorted(line for spool in spools if spool for line in _read_lines(spool))
        name = f"{self.kind}/{self.kind}-{shard:05d}-of-{self.shards:05d}"
        staged = f"{self.staging}/{name}.jsonl"
        with FileSystems.create(staged, compression_type=_TEXT) as file:
            for line in lines:
                file.write(line)
        yield StagedFile(staged, name + ".jsonl")
        if self.parquet:
            from pipeline.write_parquet import write_parquet

            write_parquet(lines, f"{self.staging}/{name}.parquet")
            yield StagedFile(f"{self.staging}/{name}.parquet", name + ".parquet")


class SpoolRows(beam.DoFn):
    """Writes a bundle's rows to one file a shard, and names the files when the bundle ends: (shard, path)."""

    def __init__(self, staging: str, kind: str, to_row: Callable[[Any], dict[str, Any]], shards: int):
        self._staging = staging
        self._kind = kind
        self._to_row = to_row
        self._shards = shards

    def start_bundle(self) -> None:
        self._spools: dict[int, tuple[str, Any]] = {}

    def process(self, record: Any) -> None:
        line = json.dumps(self._to_row(record), ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        shard = sample_rank(record.ref.identity) % self._shards
        if shard not in self._spools:
            path = f"{self._staging}/spool/{self._kind}-{shard}-{uuid.uuid4().hex}"
            self._spools[shard] = (path, FileSystems.create(path, compression_type=_TEXT))
        self._spools[shard][1].write(line)

    def finish_bundle(self) -> Iterator[WindowedValue]:
        window = GlobalWindow()
        for shard, (path, file) in self._spools.items():
            file.close()
            yield WindowedValue((shard, path), window.max_timestamp(), (window,))


@dataclasses.dataclass
class PublishFiles(beam.PTransform):
    """Renames staged files to their final names once all of them are there.

    What an earlier run left under such names goes. Elements in: `StagedFile`s; element out: the number of files.
    """

    output: str

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, staged: beam.PCollection[StagedFile]) -> beam.PCollection[int]:
        """Wires one call over all files."""
        return staged.pipeline | "Once" >> beam.Create([self.output]) | "Rename" >> beam.Map(publish, beam.pvalue.AsList(staged))


def publish(output: str, staged: Sequence[StagedFile]) -> int:
    """Moves staged files under `output`; files of an earlier run of a batch job that are not among them go."""
    final = {f"{output}/{file.final}": file.staged for file in staged}
    for folder in sorted({posixpath.dirname(path) for path in final}):
        _make_folder(folder)
        old = [entry.path for match in FileSystems.match([f"{escape_glob(folder)}/*"]) for entry in match.metadata_list]
        stale = [path for path in old if _SHARD_NAME.search(path) and path not in final]
        if stale:
            FileSystems.delete([escape_glob(path) for path in stale])
    FileSystems.rename(list(final.values()), list(final))
    return len(final)


_SHARD_NAME = re.compile(r"/(detections|dead_letters)-\d{5}-of-\d{5}\.(jsonl|parquet)$|/coco/(results|images)\.json$")


def check_output(output: str, write: bool = True) -> None:
    """Makes sure that results can be written; without `write` only as far as that can be told without writing.

    Raises:
      OutputError: They cannot.
    """
    probe = f"{output}/{STAGING}probe"
    try:
        if not write:
            FileSystems.match([f"{escape_glob(output)}/*"], limits=[1])
            _check_local_folder(output)
            return
        _make_folder(output)
        with FileSystems.create(probe, compression_type=_TEXT) as file:
            file.write(b"probe")
        FileSystems.delete([escape_glob(probe)])
    except OutputError:
        raise
    except Exception as err:
        raise OutputError(
            f"output {output}: expected a folder that can be written, but: {' '.join(str(err).split())[:300]}"
        ) from err


def write_file(path: str, content: bytes) -> None:
    """Writes a whole file: under its final name there is all of it or nothing."""
    folder, name = posixpath.split(path)
    _make_folder(folder)
    staged = f"{folder}/{STAGING}{name}"
    with FileSystems.create(staged, compression_type=_TEXT) as file:
        file.write(content)
    FileSystems.rename([staged], [path])


def remove_staging(output: str) -> None:
    """Removes the staging folders of this and earlier runs."""
    if "://" not in output:
        import glob
        import shutil

        for folder in glob.glob(glob.escape(output) + f"/{STAGING}*"):
            shutil.rmtree(folder, ignore_errors=True)
        return
    left = [entry.path for match in FileSystems.match([f"{escape_glob(output)}/{STAGING}**"]) for entry in match.metadata_list]
    if left:
        FileSystems.delete([escape_glob(path) for path in left])


def _read_lines(path: str) -> Iterator[bytes]:
    with FileSystems.open(path, compression_type=_TEXT) as file:
        yield from iter(file.readline, b"")


def _make_folder(folder: str) -> None:
    import os

    if "://" not in folder:
        os.makedirs(folder, exist_ok=True)


def _check_local_folder(output: str) -> None:
    import os

    if "://" in output:
        return
    existing = os.path.abspath(output)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if not (os.path.isdir(existing) and os.access(existing, os.W_OK)):
        raise OutputError(f"output {output}: expected a folder that can be written, {existing} is none")
