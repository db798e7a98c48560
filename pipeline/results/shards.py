"""Shards: self-describing Parquet files of rows, each with a name that no other file ever has.

A shard (see `layout` for its name) is written under another name, synced and renamed once; on Cloud Storage it is written with
`ifGenerationMatch=0`. It is never overwritten. Only compaction deletes shards. `reader` reads them.
"""

from __future__ import annotations

import posixpath
import time
import uuid
from collections.abc import Mapping
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import OutputError
from pipeline.results.layout import ROWS, time_in_name
from pipeline.results.run import Run
from pipeline.storage.files import create, exists, folders_of, move_files, sync, write_file

_MARK = ".damaged-"  # begins the names of marks of damaged shards
COMPACTED = "compact"  # the run in the names of merged shards
_GROUP_ROWS = 16_384  # a row group has statistics, which exclude parts of a large shard
_GROUP_BYTES = 16 << 20  # dead letters may carry messages of 10 MB; readers hold a row group


class Shard(NamedTuple):
    """A shard in a results folder.

    Attributes:
      path: The file.
      kind: `detections` or `dead_letters`.
      size_bytes: Its size.
      run: The run that wrote it; `compact` for a merged one.
      written_at: The time in its name, as `20261121T020000Z`.
      generation: Its generation; empty if unknown.
    """

    path: str
    kind: str
    size_bytes: int
    run: str
    written_at: str
    generation: str = ""


def shard_of_name(path: str, size_bytes: int = 0, generation: str = "") -> Shard | None:
    """The shard with this path; None if the path is no shard's.

    >>> shard_of_name("out/detections/20261121T020000Z-0a1b-" + "0" * 32 + ".parquet").run
    '0a1b'
    """
    found = ROWS.fullmatch("/".join(path.rsplit("/", 2)[-2:]))
    return Shard(path, found[1], size_bytes, found[3], found[2], generation) if found and found[4] == "parquet" else None


def mark_of(path: str) -> str:
    """The name of the mark of a damaged shard: hidden, beside it.

    >>> mark_of("out/detections/a.parquet")
    'out/detections/.damaged-a'
    """
    folder, name = posixpath.split(path)
    return f"{folder}/{_MARK}{name.removesuffix('.parquet')}"


def is_mark(path: str) -> bool:
    """Whether a file is the mark of a damaged shard."""
    return posixpath.basename(path).startswith(_MARK)


def write_shard(output: str, kind: str, table: pa.Table, run: str) -> str:
    """Writes a shard and gives it its name; durable when it returns.

    Args:
      output: The results folder.
      kind: `detections` or `dead_letters`.
      table: Its rows; sorted by URI, so that statistics exclude shards of other folders. Its metadata is the shard's.
      run: Names the run, or `compact`.

    Returns:
      Its path.
    """
    path = f"{output}/{kind}/{_new_name(run)}"
    write_file(path, parquet_bytes(table), Run(output, run).folder, replace=False)
    return path


def stage_shard(output: str, kind: str, table: pa.Table, run: str) -> dict[str, str]:
    """Writes a shard for runners that may run a bundle again: its staged file and its final name."""
    name, staging = _new_name(run), Run(output, run).folder
    with create(f"{staging}/{name}") as file:
        file.write(parquet_bytes(table))
    return {f"{staging}/{name}": f"{output}/{kind}/{name}"}


def publish_shard(staged: Mapping[str, str]) -> None:
    """Gives a staged shard its name; durable when it returns. May be repeated, also by several processes at once."""
    for path, final in staged.items():
        try:
            move_files({path: final}, replace=False)
        except (FileNotFoundError, FileExistsError) as err:  # an earlier attempt has renamed it
            if not exists(final):
                message = f"{path} is gone and {final} is not there; was the staging folder removed?"
                raise OutputError(f"output: {message}") from err
            sync(folders_of([final]))  # the process that renamed it may have died before it did so


def parquet_bytes(table: pa.Table) -> bytes:
    """A table as a Parquet file."""
    sink = pa.BufferOutputStream()
    rows = max(1, min(_GROUP_ROWS, _GROUP_BYTES * len(table) // max(1, table.nbytes)))
    pq.write_table(table, sink, compression="zstd", row_group_size=rows, write_page_checksum=True)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _new_name(run: str) -> str:
    return f"{time_in_name(time.time())}-{run}-{uuid.uuid4().hex}.parquet"
