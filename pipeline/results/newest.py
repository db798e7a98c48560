"""The rows of detections that count: of one key the newest, whatever ran, was killed or ran twice.

Which rows count is decided from their keys and ages, 17 bytes of memory a row and 9 more while they are sorted; the rows
themselves come in parts of at most 1,000. `by_uri` sorts them on the local disk.
"""

from __future__ import annotations

import bisect
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from models.evaluate import detection_rows
from models.evaluate.detection_rows import ImageRow, RowsError, from_json
from models.progress import shown
from pipeline.results.layout import DETECTIONS, time_in_name
from pipeline.results.rows import SCHEMAS, json_rows
from pipeline.results.shards import (
    COMPACTED,
    Shard,
    contains,
    list_shards,
    read_batches,
    read_columns,
    shard_of_name,
    undisturbed,
)

_ROWS = 1000  # in a part; each is a few kB as Python objects


class Wanted(NamedTuple):
    """Which rows are wanted; empty: all.

    Attributes:
      run: Only rows that this run wrote.
      model: Only rows of the model with this name.
      version: Only those of this version.
      settings: Only those of these settings, as `RowVersion` has them.
      since: Only those that were made from this moment on, in seconds since the epoch.
    """

    run: str = ""
    model: str = ""
    version: str = ""
    settings: str = ""
    since: float = 0.0

    def may_be_in(self, shard: Shard) -> bool:
        """Whether a shard may hold such rows, by its name; rows are never younger than their shard."""
        is_wanted_run = not self.run or shard.run in (self.run, COMPACTED)
        return is_wanted_run and (not self.since or shard.written_at >= time_in_name(self.since))

    def texts(self) -> dict[str, str]:
        """The wanted texts by column."""
        texts = {"run": self.run, "model": self.model, "version": self.version, "settings": self.settings}
        return {name: value for name, value in texts.items() if value}


ALL = Wanted()


def lost_rows(numbers: Sequence[np.ndarray], made_at: Sequence[np.ndarray], are_detections: Sequence[bool]) -> list[np.ndarray]:
    """Which rows do not count, `(N,) bool` for each shard: of one number the newest counts, a detection before any dead letter.

    Args:
      numbers: Of each shard the number of each row by which they are one: mostly its key.
      made_at: Of each shard the age of each row.
      are_detections: Of each shard whether its rows are detections. Of equal rows the last shard's counts.

    >>> [lost.tolist() for lost in lost_rows([np.array([7, 8]), np.array([8])], [np.array([1, 1]), np.array([2])], [True, True])]
    [[False, True], [False]]
    """
    every = np.concatenate([np.zeros(0, np.uint64), *numbers])
    every.sort()  # in place: a copy would take as much again
    repeated = np.unique(every[1:][every[1:] == every[:-1]])
    del every
    lost = [np.zeros(len(each), bool) for each in numbers]
    indices = [np.flatnonzero(contains(repeated, each)) for each in numbers]
    counts = list(map(len, indices))
    if not sum(counts):
        return lost
    number = np.concatenate([each[index] for each, index in zip(numbers, indices, strict=True)])
    ages = np.concatenate([each[index] for each, index in zip(made_at, indices, strict=True)])
    order = np.lexsort((ages, np.repeat(are_detections, counts), number))  # a stable sort
    loses = np.zeros(len(order), bool)
    loses[order[:-1]] = number[order][1:] == number[order][:-1]
    for mask, index, of_shard in zip(lost, indices, np.split(loses, np.cumsum(counts)[:-1]), strict=True):
        mask[index[of_shard]] = True
    return lost


def newest_rows(output: str, wanted: Wanted = ALL, kind: str = DETECTIONS, *, sort: bool = False) -> Iterator[dict[str, Any]]:
    """The JSON rows of a kind in a results folder that count, each once, shard by shard.

    Args:
      output: The results folder.
      wanted: Which rows; of these the newest count.
      kind: `detections` or `dead_letters`.
      sort: Whether detections come sorted by URI and generation; see `by_uri`.

    Raises:
      FileNotFoundError: A compaction has deleted a shard meanwhile; begin anew, see `undisturbed`.
    """
    batches = _newest_batches(output, wanted, kind)
    yield from by_uri(batches) if sort else (row for batch in batches for row in json_rows(batch, kind))


def by_uri(batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    """JSON rows sorted by URI and generation, through a temporary file that is mapped: 24 bytes of memory a row."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/rows.arrow"
        with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, SCHEMAS[DETECTIONS]) as writer:
            for batch in batches:
                writer.write_batch(batch)
        with pa.memory_map(path) as file, pa.ipc.open_stream(file) as reader:
            table = reader.read_all()
            order = pc.sort_indices(table, [("uri", "ascending"), ("generation", "ascending")]).to_numpy()
            parts = table.to_batches()
            starts = [0, *itertools.accumulate(map(len, parts))]
            for row in order:
                part = bisect.bisect_right(starts, row) - 1
                yield from json_rows(parts[part].slice(row - starts[part], 1), DETECTIONS)


def _newest_batches(output: str, wanted: Wanted, kind: str) -> Iterator[pa.RecordBatch]:
    kinds = {DETECTIONS, kind}  # a detection wins over a dead letter
    found, keys, ages = list[tuple[Shard, np.ndarray]](), list[np.ndarray](), list[np.ndarray]()
    for shard in filter(wanted.may_be_in, list_shards(output, sorted(kinds))):
        table = read_columns(shard, ["key", "made_at", *wanted.texts()])
        if table is None:
            continue
        made_at = table["made_at"].cast(pa.int64()).to_numpy()
        counts = made_at >= wanted.since * 1e6
        for name, value in wanted.texts().items():
            counts &= pc.fill_null(pc.equal(table[name], value), False).to_numpy()
        found.append((shard, counts))
        keys.append(table["key"].to_numpy()[counts])
        ages.append(made_at[counts])
    lost_by_shard = lost_rows(keys, ages, [shard.kind == DETECTIONS for shard, _ in found])
    for (_, counts), lost in zip(found, lost_by_shard, strict=True):
        counts[np.flatnonzero(counts)[lost]] = False
    del keys, ages
    for shard, counts in found:
        at = 0
        for batch in read_batches(shard, rows=_ROWS) if shard.kind == kind and counts.any() else ():
            yield batch.filter(pa.array(counts[at : at + len(batch)]))
            at += len(batch)


def read_results(output: str, wanted: Wanted = ALL) -> list[ImageRow]:
    """The rows of detections in a results folder, local or `gs://`, that count.

    Args:
      output: The folder.
      wanted: Which rows; of these the newest count.

    Raises:
      RowsError: A row has another form.
    """

    def read() -> list[ImageRow]:
        rows = shown(newest_rows(output, wanted), "reading", "rows")
        return [from_json(row, f"{output}, row {number}") for number, row in enumerate(rows, 1)]

    return undisturbed(read)


def read_rows(source: str) -> list[ImageRow]:
    """The rows of detections of an output.

    Args:
      source: A local results folder or its `detections/`, of which the rows that count are read; or what
        `models.evaluate.detection_rows.read_rows` takes.

    Raises:
      RowsError: The source has no rows, or a row has another form.
    """
    folder = Path(os.path.abspath(source))
    output = folder.parent if folder.name == DETECTIONS else folder
    if not (folder.is_dir() and any(shard_of_name(str(path)) for path in Path(output, DETECTIONS).glob("*.parquet"))):
        return detection_rows.read_rows(source)
    rows = read_results(str(output))
    if not rows:
        raise RowsError(f"{source} holds no rows: expected one line for each image")
    return rows
