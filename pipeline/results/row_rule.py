"""Which of several rows counts: the current row of an image and a model.

1. The rows of one image and one model are a group. A row without an image, of a message, is a group by its key.
2. The newest row of a group, by `made_at`, chooses the key: the generation, the version and the settings that count. None of
   these has an order: generations may be ETags, versions may be hashes, and a version that was rolled back to must win. A dead
   letter that knows no generation chooses only where no other row does, since it may be of any.
3. Of the rows of the chosen key, a detection counts before any dead letter, and then the newest row.

What is *done* is another question, and goes by key alone (see `completion`).
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.results.completion import contains, row_keys
from pipeline.results.rows import exact_uris

RULE = 1  # a merged shard has it in its metadata, so that no older release drops rows by an older rule
COLUMNS = ("key", "made_at", "uri", "uri_bytes", "model", "generation")  # what the rule needs

_HELD_ROWS = 50_000  # as many ranks are in memory
_FILES = 64  # a hundredth of the rows is in memory at once
_ON_DISK = [("groups", "u8"), ("keys", "u8"), ("made_at", "i8"), ("chooses", "?"), ("detected", "?"), ("row", "u8")]


class Ranked(NamedTuple):
    """What the rule needs of the rows of one shard.

    Attributes:
      groups: `(N,) uint64`: equal for rows of one image and model.
      keys: `(N,) uint64`.
      made_at: `(N,) int64`, microseconds.
      chooses: `(N,) bool`: False for a dead letter that knows no generation.
      detected: Whether its rows are detections.
    """

    groups: np.ndarray
    keys: np.ndarray
    made_at: np.ndarray
    chooses: np.ndarray
    detected: bool

    @staticmethod
    def of(rows: pa.RecordBatch, detected: bool) -> Ranked:
        """The ranks of rows with the columns of `COLUMNS`; with the first two alone each key counts for itself."""
        keys, made_at = rows["key"].to_numpy(), rows["made_at"].cast(pa.int64()).to_numpy()
        if "uri" not in rows.schema.names:
            return Ranked.by_key(keys, made_at, detected)
        groups = row_keys(
            (uri, "", model, "", "") for uri, model in zip(exact_uris(rows), rows["model"].to_pylist(), strict=True)
        )
        groups = np.where(_is_empty(rows["uri"]), keys, groups)
        chooses = np.full(len(keys), True) if detected else ~_is_empty(rows["generation"])
        return Ranked(groups, keys, made_at, chooses, detected)

    @staticmethod
    def joined(parts: Sequence[Ranked], detected: bool) -> Ranked:
        """The ranks of the rows of all parts of a shard."""
        none = Ranked.by_key(np.zeros(0, np.uint64), np.zeros(0, np.int64), detected)
        groups, keys, made_at, chooses = (
            np.concatenate(column) for column in zip(*(part[:4] for part in (none, *parts)), strict=True)
        )
        return Ranked(groups, keys, made_at, chooses, detected)

    @staticmethod
    def by_key(keys: np.ndarray, made_at: np.ndarray, detected: bool) -> Ranked:
        """The ranks of rows of which each key counts for itself."""
        return Ranked(keys, keys, made_at, np.full(len(keys), True), detected)


def superseded(shards: Sequence[Ranked]) -> list[np.ndarray]:
    """Which rows do not count, `(N,) bool` for each shard; of equal rows that of the last shard counts.

    >>> one, two = Ranked.by_key(np.array([7, 8]), np.array([1, 1]), True), Ranked.by_key(np.array([8]), np.array([2]), True)
    >>> [lost.tolist() for lost in superseded([one, two])]
    [[False, True], [False]]
    """
    every = np.concatenate([np.zeros(0, np.uint64), *(shard.groups for shard in shards)])
    every.sort()  # in place: a copy would take as much again
    repeated = np.unique(every[1:][every[1:] == every[:-1]])
    del every
    lost = [np.zeros(len(shard.groups), bool) for shard in shards]
    indices = [np.flatnonzero(contains(repeated, shard.groups)) for shard in shards]
    counts = list(map(len, indices))
    if not sum(counts):
        return lost
    columns = zip(*(shard[:4] for shard in shards), strict=True)
    groups, keys, made_at, chooses = (
        np.concatenate([each[index] for each, index in zip(column, indices, strict=True)]) for column in columns
    )
    detected = np.repeat([shard.detected for shard in shards], counts)
    order = np.lexsort((keys, made_at, chooses, groups))
    is_last = _last_of_each(groups[order])
    is_chosen = np.zeros(len(order), bool)
    of_group = np.diff(np.flatnonzero(is_last), prepend=-1)  # how many rows a group has
    is_chosen[order] = keys[order] == np.repeat(keys[order][is_last], of_group)
    order = np.lexsort((made_at, detected, is_chosen, groups))  # a stable sort
    loses = np.zeros(len(order), bool)
    loses[order] = ~_last_of_each(groups[order])
    for mask, index, of_shard in zip(lost, indices, np.split(loses, np.cumsum(counts)[:-1]), strict=True):
        mask[index[of_shard]] = True
    return lost


def superseded_rows(parts: Iterable[tuple[Ranked, np.ndarray]]) -> Iterator[np.ndarray]:
    """The numbers of the rows that do not count; the ranks of all but a few rows are on the local disk, 34 bytes each.

    Args:
      parts: The ranks of some rows, and the numbers of these; of equal rows the last counts.
    """
    held, held_rows = list[tuple[Ranked, np.ndarray]](), 0
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            held.append(part)
            held_rows += len(part[1])
            if held_rows > _HELD_ROWS:
                _add_to_files(folder, held)
                held, held_rows = [], 0
        if held and os.listdir(folder):
            _add_to_files(folder, held)
            held = []
        for together in itertools.chain([held], map(_of_file, os.scandir(folder))):
            for (_, rows), lost in zip(together, superseded([ranked for ranked, _ in together]), strict=True):
                yield rows[lost]


def _add_to_files(folder: str, parts: Sequence[tuple[Ranked, np.ndarray]]) -> None:
    """Adds rows to files, by their groups: those of one group are in one file."""
    table = np.concatenate(
        [np.rec.fromarrays((*ranked[:4], np.full(len(rows), ranked.detected), rows), _ON_DISK) for ranked, rows in parts]
    )
    files = table["groups"] % _FILES
    order = np.argsort(files, kind="stable")
    for number, rows in enumerate(np.split(table[order], np.searchsorted(files[order], np.arange(1, _FILES)))):
        with open(f"{folder}/{number}", "ab") as file:
            rows.tofile(file)


def _of_file(path: os.PathLike[str]) -> list[tuple[Ranked, np.ndarray]]:
    table = np.fromfile(path, _ON_DISK)
    kinds = ((table[table["detected"] == detected], detected) for detected in (False, True))
    return [
        (Ranked(rows["groups"], rows["keys"], rows["made_at"], rows["chooses"], detected), rows["row"])
        for rows, detected in kinds
    ]


def _is_empty(texts: pa.Array) -> np.ndarray:
    return np.asarray(pc.equal(texts, "").to_numpy(zero_copy_only=False))


def _last_of_each(numbers: np.ndarray) -> np.ndarray:
    """Where each run of equal numbers ends, `(N,) bool`."""
    return np.append(numbers[1:] != numbers[:-1], True)


def current_sql(detections: str, dead_letters: str) -> str:
    """The query of the current rows that are detections, for BigQuery and DuckDB.

    Args:
      detections: The table of detections, or what stands for it, such as `'out/detections/*.parquet'`.
      dead_letters: That of dead letters.
    """
    columns = "key, uri, uri_bytes, model, made_at"
    return f"""\
WITH every_row AS (
  SELECT {columns}, TRUE AS chooses FROM {detections}
  UNION ALL SELECT {columns}, generation <> '' FROM {dead_letters}
), chosen AS (
  SELECT key FROM every_row WHERE TRUE
  QUALIFY ROW_NUMBER() OVER (PARTITION BY uri, uri_bytes, model ORDER BY chooses DESC, made_at DESC, key DESC) = 1
)
SELECT * FROM {detections} WHERE key IN (SELECT key FROM chosen)
QUALIFY ROW_NUMBER() OVER (PARTITION BY key ORDER BY made_at DESC) = 1
"""  # noqa: S608  names come from the caller
