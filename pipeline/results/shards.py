"""Shards: self-describing Parquet files of rows, each with a name that no other file ever has.

A shard (see `layout` for its name) is written under another name, synced and renamed once; on Cloud Storage it is written with
`ifGenerationMatch=0`. It is never overwritten. Only compaction deletes shards; the metadata of a merged shard names its sources,
so a reader that sees both skips the sources.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
import posixpath
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import OutputError
from pipeline.failures import FOR_GOOD, one_line
from pipeline.results.completion import RowVersion
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, ROWS, time_in_name
from pipeline.results.rows import SCHEMAS, parquet_text
from pipeline.results.run import Run
from pipeline.storage.cloud import GS
from pipeline.storage.files import create, exists, folders_of, is_own_file, move_files, sync, warn_unreadable, write_file
from pipeline.storage.listing import files_of
from pipeline.storage.store import FoundFile, open_object, retried
from pipeline.storage.stores import store_of

COMPACTED = "compact"  # the run in the names of merged shards
SOURCES = b"sources"  # metadata of a merged shard: the names of the shards in it
_PART_BYTES = 1 << 20  # of an object a request
_TRIES = 10  # compactions that delete what a reader has listed
_GROUP_ROWS = 16_384  # a row group has statistics, which exclude parts of a large shard
_GROUP_BYTES = 16 << 20  # dead letters may carry messages of 10 MB; readers hold a row group
_Answer = TypeVar("_Answer")
BROKEN = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, RecursionError)  # what a damaged file raises


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


def list_shards(output: str, kinds: Sequence[str] = (DETECTIONS, DEAD_LETTERS)) -> list[Shard]:
    """The shards of a results folder, by kind and name, without those that a merged shard holds too.

    A listing is no snapshot: it may miss a merged shard that appears and a source that goes meanwhile. A second one finds the
    merged shard, so this is their union.
    """
    files = (file for _ in range(2) for kind in kinds for file in files_of(f"{output}/{kind}", "*.parquet"))
    found = {shard.path: shard for file in files if (shard := shard_of_name(*file)) and is_own_file(shard.path)}
    merged = {name for shard in found.values() if shard.run == COMPACTED for name in sources_of(shard)}
    return sorted(shard for shard in found.values() if posixpath.basename(shard.path) not in merged)


def undisturbed(read: Callable[[], _Answer]) -> _Answer:
    """What a function makes of all rows; it begins anew if a compaction has deleted a shard meanwhile."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            return read()
    return read()


def sources_of(shard: Shard) -> frozenset[str]:
    """The names of the shards that a merged shard holds, without their folder."""
    # one that is gone was merged again since: its rows lie in a shard that is listed, too, or the reader begins anew
    with contextlib.suppress(FileNotFoundError), skipping_damaged(shard), open_shard(shard) as file:
        return frozenset(json.loads((file.schema_arrow.metadata or {}).get(SOURCES, b"[]")))
    return frozenset()


@contextlib.contextmanager
def skipping_damaged(shard: Shard) -> Iterator[None]:
    """Ends a block in which a shard turns out to be damaged, with a line on standard error that names it.

    Raises:
      FileNotFoundError: The shard is gone.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except BROKEN as err:
        warn_unreadable(shard.path, one_line(err))


@contextlib.contextmanager
def _opened(shard: Shard) -> Iterator[Any]:
    """Opens the file of a shard; of an object only the parts that are read are fetched."""
    if not shard.path.startswith(GS):
        with pa.OSFile(os.fsencode(shard.path)) as file:  # as text it takes only Unicode
            yield file
        return
    from google.api_core.exceptions import NotFound, PreconditionFailed

    found = FoundFile(shard.path, shard.size_bytes, shard.generation)
    try:
        with open_object(found, retried(store_of(shard.path).read_range), _PART_BYTES) as file:
            yield file
    except (NotFound, PreconditionFailed) as err:
        raise FileNotFoundError(f"{shard.path} does not exist any more") from err


@contextlib.contextmanager
def open_shard(shard: Shard) -> Iterator[pq.ParquetFile]:
    """Opens a shard.

    Raises:
      OSError, pyarrow.ArrowException: It is damaged, or gone.
    """
    with _opened(shard) as source, pq.ParquetFile(source) as file:
        yield file


def read_batches(shard: Shard, columns: Sequence[str] | None = None, rows: int = _GROUP_ROWS) -> Iterator[pa.RecordBatch]:
    """The rows of a shard in parts; a damaged shard ends with a line on standard error.

    Args:
      shard: The shard.
      columns: Only these; default: all.
      rows: At most so many in a part.

    Raises:
      FileNotFoundError: A compaction has deleted the shard; a newer listing names the shard that holds its rows.
    """
    with skipping_damaged(shard), open_shard(shard) as file:
        yield from file.iter_batches(rows, columns=columns)


def read_columns(shard: Shard, columns: Sequence[str] | None = None) -> pa.Table | None:
    """Some columns, or all, of a shard; None, with a line on standard error, if it is damaged or has others than this release's.

    Raises:
      FileNotFoundError: A compaction has deleted the shard.
    """
    with skipping_damaged(shard), open_shard(shard) as file:
        if not file.schema_arrow.equals(SCHEMAS[shard.kind]):
            raise ValueError("expected the columns of this release")
        table = file.read(columns)
        if any(table[name].null_count for name in ("key", "made_at") if name in table.column_names):
            raise ValueError("expected a key and a time in each row")
        return table
    return None


def done_keys(output: str, version: RowVersion, kind: str, prefixes: Sequence[str] = ("",)) -> np.ndarray:
    """The keys of the rows of a kind that count as done, sorted, `(N,) uint64`: 8 bytes of memory a row, 16 while they are read.

    Args:
      output: The results folder.
      version: Only rows of this model, version and settings.
      kind: `detections`, or `dead_letters`, of which transient ones never count.
      prefixes: Only images whose URIs may begin with one of these; shards whose statistics exclude all of them are not read.
    """

    def read() -> np.ndarray:
        parts = (part for shard in list_shards(output, (kind,)) for part in _keys_in(shard, version, prefixes))
        keys = np.concatenate([np.zeros(0, np.uint64), *parts])
        keys.sort()  # in place: a copy would take as much again
        return keys

    return undisturbed(read)


def contains(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Which of some keys are among sorted keys, `(N,) bool`.

    >>> contains(np.array([3, 7], np.uint64), np.array([7, 8, 2], np.uint64)).tolist()
    [True, False, False]
    """
    if not len(keys):
        return np.zeros(len(wanted), bool)
    return np.asarray(np.take(keys, np.searchsorted(keys, wanted), mode="clip") == wanted)


def _keys_in(shard: Shard, version: RowVersion, prefixes: Sequence[str]) -> Iterator[np.ndarray]:
    import pyarrow.dataset as ds  # it imports pandas

    wanted = {"model": version.model, "version": version.version, "settings": version.settings_of(shard.kind)}
    is_done = functools.reduce(operator.and_, (ds.field(name) == value for name, value in wanted.items()))
    if shard.kind == DEAD_LETTERS:
        is_done &= ds.field("reason").isin(sorted(FOR_GOOD))
    uri = ds.field("uri")
    begins = ((uri >= prefix) & (uri <= f"{prefix}\U0010ffff") for prefix in map(parquet_text, prefixes))
    may_match = is_done & functools.reduce(operator.or_, begins, ds.scalar(False))
    schema = SCHEMAS[shard.kind]
    with skipping_damaged(shard), _opened(shard) as source:
        groups = ds.ParquetFileFormat().make_fragment(source).subset(may_match, schema=schema)  # by their statistics
        yield groups.to_table(schema, columns=["key"], filter=is_done)["key"].to_numpy()


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
    pq.write_table(table, sink, compression="zstd", row_group_size=rows)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _new_name(run: str) -> str:
    return f"{time_in_name(time.time())}-{run}-{uuid.uuid4().hex}.parquet"
