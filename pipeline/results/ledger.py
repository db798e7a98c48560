"""The ledger: which version of which image has a row, by which model and settings. The rows themselves are the ledger.

    detections/detections-<…>.jsonl    rows, the truth
    index/detections-<…>.parquet       their identities, models and settings, so that readers need not parse the rows

An index also has facts that rows lack: settings, the model of dead letters without one, and the job's start
(the file name of a stream's rows has their window's start). An index gets its name after its rows, and counts only for a file
of exactly the size that it was made for. Without an index the rows are parsed and the settings are unknown; a row with unknown
settings never counts as done.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import uuid
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from apache_beam.io.filesystems import FileSystems

from pipeline.records import identity_hash, name_bytes, name_of
from pipeline.results.completion import UNKNOWN, CompletionRule, Entry, Provenance
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, INDEX, index_name, is_result
from pipeline.storage.files import create, move_files, read_file, read_lines
from pipeline.storage.globs import escape_glob
from pipeline.storage.state import is_own_file, warn_unreadable

_ROWS_AT_ONCE = 16_384
_SIZE = b"bytes_of_rows"
_SCHEMA = pa.schema(
    [
        ("uri_hash", pa.uint64()),
        ("identity_hash", pa.uint64()),
        ("uri", pa.binary()),  # not every file name is Unicode
        ("generation", pa.binary()),
        *((name, pa.string()) for name in ("model", "version", "settings", "reason")),
        ("made_at", pa.float64()),
    ]
)
_TEXTS = ("model", "version", "settings", "reason")
_COLUMNS = ("uri", "generation", *_TEXTS, "made_at")
_YEAR_9999 = 253_370_764_800.0
_BROKEN = (pa.ArrowException, OSError, ValueError, TypeError, AttributeError, KeyError)  # what a damaged index raises
_decoder = json.JSONDecoder()


class RowsFile(NamedTuple):
    """A file of rows.

    Attributes:
      path: The file.
      kind: `detections` or `dead_letters`.
      size_bytes: Its size.
      index_path: Its index; empty if it has none.
    """

    path: str
    kind: str
    size_bytes: int
    index_path: str = ""


def list_files_of_rows(output: str) -> list[RowsFile]:
    """All files of rows in a results folder, of all runs and streams, sorted by kind and name; no files of others."""
    indexes = {path for path, _ in _sizes(f"{output}/{INDEX}")}
    found = []
    for kind in (DETECTIONS, DEAD_LETTERS):
        for path, size_bytes in _sizes(f"{output}/{kind}"):
            if path.endswith(".jsonl") and is_result(path, output) and is_own_file(path):
                index = f"{output}/{index_name(path)}"
                found.append(RowsFile(path, kind, size_bytes, index if index in indexes else ""))
    return found


def read_entries(file: RowsFile) -> Iterator[Entry]:
    """The entries of a file's rows, in order: from its index, or from the rows if no index fits."""
    index, given = _open_index(file), 0
    if index:
        try:
            for entry in _entries_in(index, file.kind):
                yield entry
                given += 1
            return
        except _BROKEN as err:
            _say_unreadable(file, err)
    yield from islice(filter(None, (entry_of(line, file.kind, UNKNOWN) for line in read_lines(file.path))), given, None)


def _entries_in(index: pq.ParquetFile, kind: str) -> Iterator[Entry]:
    names = [name for name in _COLUMNS if name in index.schema_arrow.names]  # earlier versions had no `made_at`
    for batch in index.iter_batches(_ROWS_AT_ONCE, columns=names):
        columns = {"made_at": [None] * batch.num_rows, **batch.to_pydict()}
        for uri, generation, model, version, settings, reason, made_at in zip(*map(columns.__getitem__, _COLUMNS), strict=True):
            is_known = made_at is not None and 0.0 < made_at < _YEAR_9999
            age = made_at if is_known else 0.0
            yield Entry(name_of(uri), name_of(generation), kind, model, version, settings, reason, age)


def read_keys(file: RowsFile, done: CompletionRule) -> Iterator[np.ndarray]:
    """The keys of a file's rows that count as done, in parts `(N, 2) uint64`; each row is a `key_of`."""
    index = _open_index(file)
    if index is None or not done.provenance.settings(file.kind):
        return  # without an index the settings are not known
    try:
        yield from _keys_in(index, file.kind, done)
    except _BROKEN as err:
        _say_unreadable(file, err)


def _keys_in(index: pq.ParquetFile, kind: str, done: CompletionRule) -> Iterator[np.ndarray]:
    wanted = dict(zip(("model", "version", "settings"), (*done.provenance[2:], done.provenance.settings(kind)), strict=True))
    for batch in index.iter_batches(_ROWS_AT_ONCE, columns=["uri_hash", "identity_hash", *_TEXTS]):
        mask = pc.is_in(batch["reason"], pa.array(["", *done.reasons] if kind == DEAD_LETTERS else [""]))
        for name, value in wanted.items():
            mask = pc.and_(mask, pc.equal(batch[name], value))
        of_done = batch.filter(mask)
        yield np.stack([of_done["uri_hash"].to_numpy(), of_done["identity_hash"].to_numpy()], axis=1)


def key_of(uri: str, generation: str) -> tuple[int, int]:
    """The hashes of an image's name and of its identity, 64 bits each: two images have one key by less than any accident."""
    return identity_hash(uri), identity_hash(f"{uri}#{generation}")


@contextlib.contextmanager
def writing_entries(path: str) -> Iterator[Callable[[bytes, Entry | None], None]]:
    """Writes an index while its rows are written: within, call the given function with each line and its entry.

    Args:
      path: Of the index; it is complete when the block ends.
    """
    entries: list[Entry] = []
    size_bytes = 0
    with create(path) as file, pq.ParquetWriter(file, _SCHEMA, compression="zstd") as writer:

        def add(line: bytes, entry: Entry | None) -> None:
            nonlocal size_bytes
            size_bytes += len(line)
            if entry:
                entries.append(entry)
            if len(entries) == _ROWS_AT_ONCE:
                write()

        def write() -> None:
            writer.write_batch(_batch(entries))
            entries.clear()

        yield add
        write()
        writer.add_key_value_metadata({_SIZE: str(size_bytes)})


@contextlib.contextmanager
def writing_index(path: str, kind: str, provenance: Provenance, made_at: float = 0.0) -> Iterator[Callable[[bytes], bytes]]:
    """Writes the index of rows while these are written: within, call the given function with each line; it returns the line.

    Args:
      path: Of the index; it is complete when the block ends.
      kind: `detections` or `dead_letters`.
      provenance: By what the rows are made.
      made_at: When the job began that makes them, seconds since the epoch; 0 where the name of their file has it.
    """
    with writing_entries(path) as add:

        def note(line: bytes) -> bytes:
            entry = entry_of(line, kind, provenance)
            add(line, entry and entry._replace(made_at=made_at))
            return line

        yield note


def write_index(rows: str, output: str, provenance: Provenance, staging: str) -> None:
    """Writes the index of a file of rows that is there already.

    Args:
      rows: The file's name in the results folder.
      output: The results folder.
      provenance: By what the rows were made.
      staging: Folder for what a kill leaves.
    """
    staged, index = f"{staging}/{uuid.uuid4().hex}", f"{output}/{index_name(rows)}"
    with writing_index(staged, posixpath.dirname(rows), provenance) as note:
        for line in read_lines(f"{output}/{rows}"):
            note(line)
    move_files({staged: index})


def entry_of(line: bytes, kind: str, provenance: Provenance) -> Entry | None:
    """The entry of a row in a file; None where it is no row of an image.

    Args:
      line: One line of JSON.
      kind: `detections` or `dead_letters`.
      provenance: Says what the row does not.
    """
    try:
        row = _beginning(line.decode()) if kind == DETECTIONS else json.loads(line)
        image, model = row["image"], row.get("model", {})  # of a dead letter, where a model failed
        uri, generation, reason = image["uri"], image.get("generation", ""), row.get("reason", "")
        name, version = (model.get("name", ""), model.get("version", "")) if model or kind == DETECTIONS else provenance[2:]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not all(isinstance(text, str) for text in (uri, generation, reason, name, version)):
        return None
    return Entry(uri, generation, kind, name, version, provenance.settings(kind), reason)


def _beginning(text: str) -> dict[str, Any]:
    """Image and model of a row, which stand before its detections, and are read without these where the row is as we write it."""
    row: dict[str, Any] = {}
    beginning, place = '{"', 0
    for name in ("image", "model"):
        if not text.startswith(f'{beginning}{name}": ', place):
            return dict(json.loads(text))
        row[name], place = _decoder.raw_decode(text, place + len(beginning) + len(name) + 3)
        beginning = ', "'
    return row


def _batch(entries: list[Entry]) -> pa.RecordBatch:
    keys = [key_of(entry.uri, entry.generation) for entry in entries]
    names = [[name_bytes(name) for name in column] for column in ([e.uri for e in entries], [e.generation for e in entries])]
    texts = [[_text(getattr(entry, name)) for entry in entries] for name in _TEXTS]
    hashes = np.array(keys, np.uint64).reshape(-1, 2)
    return pa.RecordBatch.from_arrays(
        [
            *map(pa.array, (hashes[:, 0], hashes[:, 1])),
            *(pa.array(column, pa.binary()) for column in names),
            *(pa.array(column, pa.string()) for column in texts),
            pa.array([entry.made_at or None for entry in entries], pa.float64()),
        ],
        schema=_SCHEMA,
    )


def _open_index(file: RowsFile) -> pq.ParquetFile | None:
    """The index of a file of rows; None where there is none, or none that was made for this very file."""
    if not file.index_path or not is_own_file(file.index_path):
        return None
    try:
        source = pa.BufferReader(read_file(file.index_path)) if "://" in file.index_path else file.index_path
        index = pq.ParquetFile(source, read_dictionary=list(_TEXTS))
    except _BROKEN as err:
        _say_unreadable(file, err)
        return None
    made_for = (index.metadata.metadata or {}).get(_SIZE)
    return index if made_for == str(file.size_bytes).encode() else None


def _say_unreadable(file: RowsFile, err: Exception) -> None:
    warn_unreadable(file.index_path, " ".join(str(err).split())[:200])


def _sizes(folder: str) -> list[tuple[str, int]]:
    matches = FileSystems.match([f"{escape_glob(folder)}/*"])
    return sorted((entry.path, entry.size_in_bytes) for match in matches for entry in match.metadata_list)


def _text(value: str) -> str:
    return value.encode("utf-8", "backslashreplace").decode()
