"""The check of a results folder: are all its shards whole, and which images lost their rows by damage.

Jobs read the keys of shards alone, which may be whole where the boxes beside them are not. So a damaged shard gets a mark, a file
beside it; readers read a marked shard whole before they count a row of it (see `reader`). A mark alone hides nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from models.base.progress import shown
from pipeline.results.completion import contains
from pipeline.results.reader import DamagedError, ResultsFolder, batches_in, parquet_file
from pipeline.results.rows import exact_uris
from pipeline.results.shards import KEYS, Shard, digest, mark_of
from pipeline.storage.files import delete_files, write_file


class Checked(NamedTuple):
    """What a check found.

    Attributes:
      shards: How many shards are whole.
      rows: How many rows they have.
      damaged: The paths of the others, with what is wrong.
      lost: The images that have rows in damaged shards alone, as far as their names can be read.
      nameless: How many damaged shards do not even show names.
    """

    shards: int
    rows: int
    damaged: dict[str, str]
    lost: list[str]
    nameless: int


def check(output: str) -> Checked:
    """Reads every shard of a results folder whole, marks those that are damaged, and removes other marks.

    Raises:
      FileNotFoundError: A compaction has deleted a shard meanwhile; begin anew, see `undisturbed`.
      UnreadableError: A shard cannot be read now.
    """
    results = ResultsFolder(output, trust_marks=False)
    found = [keys for _, keys in shown(results.read(_keys), "checking", "files", len(results.shards))]
    keys = np.sort(np.concatenate([np.zeros(0, np.uint64), *found]))
    damaged = [shard for shard in results.shards if shard.path in results.damaged]
    for shard in damaged:
        write_file(mark_of(shard.path), b"damaged\n")
    delete_files(results.marks - {mark_of(shard.path) for shard in damaged})
    named = [*ResultsFolder(output, trust_marks=False).tables(["key", "uri", "uri_bytes"], damaged)]
    lost = [table.filter(~contains(keys, table["key"].to_numpy())) for _, table in named]
    uris = sorted({uri for table in lost for uri in exact_uris(table) if uri})
    return Checked(len(found), len(keys), dict(results.damaged), uris, len(damaged) - len(named))


def _keys(shard: Shard, source: Any) -> np.ndarray:
    """The keys of a shard, of which every page is read.

    Raises:
      DamagedError: A merged shard has others than it says.
    """
    with parquet_file(shard, source) as file:
        keys = np.concatenate([np.zeros(0, np.uint64), *(batch["key"].to_numpy() for batch in batches_in(shard, file))])
        said = (file.schema_arrow.metadata or {}).get(KEYS)
    if said not in (None, digest(keys)):
        raise DamagedError("expected the rows that a compaction merged into it, got others")
    return keys
