"""The current rows of a results folder: of each image and model the row of detections that counts, see `row_rule`.

Which rows count is decided from their keys, images and ages, which lie on the local disk meanwhile: a byte of memory a row. The
rows themselves come in parts of at most 1,000. `by_uri` sorts them on the local disk, too.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from models.base.progress import shown
from models.evaluate import detection_rows
from models.evaluate.detection_rows import ImageRow, RowsError, from_json
from pipeline.results.layout import DETECTIONS, check_results
from pipeline.results.reader import (
    BATCH_ROWS,
    KINDS,
    DamagedError,
    ResultsFolder,
    batches_in,
    batches_of,
    list_shards,
    parquet_file,
    undisturbed,
)
from pipeline.results.row_rule import COLUMNS, Ranked, superseded_rows
from pipeline.results.rows import FORMATS, JSON_COLUMNS, json_rows
from pipeline.results.shards import Shard
from pipeline.results.wanted import ALL, Wanted
from pipeline.storage.web import WEB


def current_rows(output: str, wanted: Wanted = ALL, *, kind: str = DETECTIONS, sort: bool = False) -> Iterator[dict[str, Any]]:
    """The current rows of a results folder as JSON rows, each once, shard by shard.

    Args:
      output: The results folder.
      wanted: Which rows; of these the current ones.
      kind: The current rows that are detections, or those that are dead letters.
      sort: Whether they come sorted by URI and generation; see `by_uri`.

    Raises:
      FileNotFoundError: A compaction has deleted a shard meanwhile; begin anew, see `undisturbed`.
      UnreadableError: A shard cannot be read now; or, when all others are read, one is damaged.
    """
    batches = (batch for _, batch in current_batches(output, wanted, (kind,)))
    yield from by_uri(batches, kind) if sort else (row for batch in batches for row in json_rows(batch, kind))


def by_uri(batches: Iterable[pa.RecordBatch], kind: str = DETECTIONS) -> Iterator[dict[str, Any]]:
    """JSON rows sorted by URI and generation, through a temporary file that is mapped: 24 bytes of memory a row."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/rows.arrow"
        with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, FORMATS[kind].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        with pa.memory_map(path) as file, pa.ipc.open_stream(file) as reader:
            table = reader.read_all()
            order = pc.sort_indices(table, [("uri", "ascending"), ("generation", "ascending")]).to_numpy()
            parts = table.to_batches()
            starts = [0, *itertools.accumulate(map(len, parts))]
            for row in order:
                part = bisect.bisect_right(starts, row) - 1
                yield from json_rows(parts[part].slice(row - starts[part], 1), kind)


def current_batches(
    output: str, wanted: Wanted = ALL, kinds: Sequence[str] = (DETECTIONS,)
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The current rows of some kinds with all their columns, in parts with their kind; see `current_rows`."""
    results = ResultsFolder(output, KINDS, wanted.may_be_in)
    counts, places = bytearray(), dict[Shard, slice]()

    def wanted_rows() -> Iterator[tuple[Ranked, np.ndarray]]:
        for shard, (is_wanted, ranked) in results.read(functools.partial(_ranked, wanted)):
            start = len(counts)
            counts.extend(is_wanted.tobytes())
            places[shard] = slice(start, len(counts))
            yield ranked, start + np.flatnonzero(is_wanted)

    for lost in superseded_rows(wanted_rows()):
        np.frombuffer(counts, bool)[lost] = False
    counts_in = {shard: np.frombuffer(counts, bool)[place] for shard, place in places.items() if shard.kind in kinds}
    current, at = None, 0
    for shard, batch in results.batches(shard for shard, counts in counts_in.items() if counts.any()):
        current, at = shard, at if shard == current else 0
        yield shard.kind, batch.filter(pa.array(counts_in[shard][at : at + len(batch)]))
        at += len(batch)
    results.check_whole()


def _ranked(wanted: Wanted, shard: Shard, source: Any) -> tuple[np.ndarray, Ranked]:
    """Which rows of a shard are wanted, and the ranks of these."""
    found, ranks, detected = [np.zeros(0, bool)], list[Ranked](), shard.kind == DETECTIONS
    with parquet_file(shard, source) as file:
        for batch in batches_in(shard, file, [*COLUMNS, *wanted.columns], BATCH_ROWS):
            found.append(wanted.among(batch, shard.kind))
            ranks.append(Ranked.of(batch.filter(pa.array(found[-1])), detected))
    ranked = Ranked.joined(ranks, detected)
    return np.concatenate(found), Ranked.by_key(ranked.keys, ranked.made_at, detected) if wanted.every else ranked


def read_results(output: str, wanted: Wanted = ALL) -> list[ImageRow]:
    """The current rows of detections in a results folder, local or on object storage.

    Args:
      output: The folder.
      wanted: Which rows; of these the current ones.

    Raises:
      RowsError: A row has another form.
      UnreadableError: The folder cannot be read now, or a shard is damaged.
    """

    def read() -> list[ImageRow]:
        rows = shown(current_rows(output, wanted), "reading", "rows")
        return [from_json(row, f"{output}, row {number}") for number, row in enumerate(rows, 1)]

    return undisturbed(read)


def read_rows(source: str, wanted: Wanted = ALL) -> list[ImageRow]:
    """The rows of detections of an output.

    Args:
      source: A results folder or its `detections/`, local or on object storage, of which the current rows are read; or what
        `models.evaluate.detection_rows.read_rows` takes.
      wanted: Which rows of a results folder.

    Raises:
      RowsError: The source has no rows, or a row has another form.
      InputError: Object storage has no results there.
      UnreadableError: The folder cannot be read now, or a shard is damaged.
    """
    is_away = "://" in source and not source.startswith(WEB)
    output = (source.rstrip("/") if is_away else os.path.abspath(source)).removesuffix(f"/{DETECTIONS}")
    if is_away:
        check_results(output)
    elif not (os.path.isdir(source) and list_shards(output, (DETECTIONS,))):
        if wanted != ALL:
            raise RowsError(
                f"{source} is no results folder: --model, --model-version, --settings and --all choose among its rows"
            )
        return detection_rows.read_rows(source, _rows_of_file)
    rows = read_results(output, wanted)
    if not rows:
        raise RowsError(f"{source} holds no row of detections that counts{wanted.flags()}")
    return rows


def _rows_of_file(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON rows of a Parquet file that lies in no results folder, perhaps without keys and times."""
    try:
        for batch in batches_of(Shard(str(path), DETECTIONS, path.stat().st_size, ""), JSON_COLUMNS):
            yield from json_rows(batch, DETECTIONS)
    except DamagedError as err:
        raise RowsError(f"{path}: expected rows of detections as Parquet, got {err}") from err
