"""Shards: self-describing Parquet files of rows, each with a name that no other file ever has.

A shard (see `layout` for its name) has its name as soon as its rows are there, on every runner: on a disk it is written under
another name, synced and renamed; on Cloud Storage it is written with `ifGenerationMatch=0`. It is never overwritten. Only
compaction deletes shards. `reader` reads them.
"""

from __future__ import annotations

import hashlib
import itertools
import posixpath
import time
import uuid
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.records import name_bytes
from pipeline.results.layout import ROWS, time_in_name
from pipeline.results.run_folder import Run
from pipeline.storage.files import add_file, folders_of, is_own_file, read_file, sync

KEYS = b"keys"  # metadata of a merged shard: the digest of its keys
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
      generation: Its generation; empty if unknown.
    """

    path: str
    kind: str
    size_bytes: int
    run: str
    generation: str = ""


def shard_of_name(path: str, size_bytes: int = 0, generation: str = "") -> Shard | None:
    """The shard with this path; None if the path is no shard's.

    >>> shard_of_name("out/detections/20261121T020000Z-0a1b-" + "0" * 32 + ".parquet").run
    '0a1b'
    """
    found = ROWS.fullmatch("/".join(path.rsplit("/", 2)[-2:]))
    return Shard(path, found[1], size_bytes, found[3], generation) if found and found[4] == "parquet" else None


def digest(keys: np.ndarray) -> bytes:
    """What the metadata of a merged shard says of its keys, in any order."""
    return hashlib.blake2b(np.sort(keys).tobytes(), digest_size=16).hexdigest().encode()


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
    """Writes a shard under a name that no other file has; durable when it returns.

    Args:
      output: The results folder.
      kind: `detections` or `dead_letters`.
      table: Its rows; sorted by URI, so that statistics exclude shards of other folders. Its metadata is the shard's.
      run: Names the run, or `compact`.

    Returns:
      Its path.
    """
    path = f"{output}/{kind}/{time_in_name(time.time())}-{run}-{uuid.uuid4().hex}.parquet"
    if not add_file(path, parquet_bytes(table)):
        raise FileExistsError(f"{path} is there already, with other content")
    return path


def add_rows(run: Run, kind: str, table: pa.Table, asked_by: Sequence[str] = ()) -> str:
    """Adds rows of a run as a shard, once, however often a runner repeats the bundle that made them; durable when it returns.

    The name holds the run's start, the run, and a hash of the rows' keys. If a file has it already, that is an earlier attempt's,
    whose answer was lost or whose bundle failed, if it is read and has the same keys. Any other file is left alone, and the shard
    gets another name. An attempt that had cut its bundle differently has other names; of its rows the newest count.

    Args:
      run: The run.
      kind: `detections` or `dead_letters`.
      table: Its rows, at least one.
      asked_by: The messages that asked for the rows of a stream, which may ask for one image again: its row is added again.

    Returns:
      The path of the shard.
    """
    table, keys = table.sort_by("uri"), np.sort(table["key"].to_numpy())
    content, named = parquet_bytes(table), [keys.tobytes(), *sorted(map(name_bytes, asked_by))]
    for attempt in itertools.count():
        digest = hashlib.blake2b(b"\0".join([*named, b"%d" % attempt]), digest_size=16).hexdigest()
        path = f"{run.output}/{kind}/{time_in_name(run.began)}-{run.name}-{digest}.parquet"
        if add_file(path, content):
            return path
        if _has_keys(path, keys):
            sync(folders_of([path]))  # whoever renamed it may have died before it did so
            return path
    raise AssertionError("unreachable")


def _has_keys(path: str, keys: np.ndarray) -> bool:
    """Whether a file that has the name of a shard is read whole, and has rows of these sorted keys."""
    if not is_own_file(path):
        return False
    content = read_file(path)
    try:
        # all columns: it may be damaged in others
        found = pq.read_table(pa.BufferReader(content), page_checksum_verification=True)["key"]
        return np.array_equal(np.sort(found.to_numpy()), keys)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError):  # of its content, since its bytes were read
        return False


def parquet_bytes(table: pa.Table) -> bytes:
    """A table as a Parquet file."""
    sink = pa.BufferOutputStream()
    rows = max(1, min(_GROUP_ROWS, _GROUP_BYTES * len(table) // max(1, table.nbytes)))
    pq.write_table(table, sink, compression="zstd", row_group_size=rows, write_page_checksum=True)
    content: bytes = sink.getvalue().to_pybytes()
    return content
