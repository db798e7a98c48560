"""Manifests: lists of images, as text, CSV, JSON Lines or Parquet; also inventories of buckets, whose generations are believed.

An S3 Inventory is given by its `manifest.json`, which names its files and their columns.

A line that names no image becomes one dead letter, named after its place, `<manifest>:<line>`; the other lines are read. Memory
holds one line at a time, of a bounded length.
"""

from __future__ import annotations

import csv
import functools
import gzip
import hashlib
import io
import itertools
import json
import os
import urllib.parse
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from pipeline.errors import InputError
from pipeline.extra_fields import extra_columns, extra_text
from pipeline.failures import Failure, ImageError, one_line
from pipeline.listing.inventories import Objects, files_of_s3, is_of_s3, told_version
from pipeline.listing.names import CONTROL, bad_name, file_of, full_name, names_image, record_range
from pipeline.records import DeadLetter, ImageRef
from pipeline.storage.fetch import open_file
from pipeline.storage.globs import real_folder
from pipeline.storage.store import FoundFile
from pipeline.storage.stores import LISTED

_MANIFEST_ENDINGS = (".txt", ".csv", ".jsonl", ".parquet")
_NAMING = ("uri", "path", "file", "filename", "image")  # columns that name the image, the best first
_OURS = frozenset({"uri", "path", "image", "generation"})
_ROWS_AT_ONCE = 1000
_FOLDERS_KNOWN = 4096
_LONGEST_LINE = 1 << 20  # characters; as JSON it may take 25 times as many bytes
_NOT_CLOSED = "expected the end of a quoted cell in this line; a quote in a cell is written twice; the lines behind it are read"
_BLANK = " \t\r\n"  # around a name; other spaces of Unicode belong to it

Named = tuple[str, Mapping[str, Any]]  # an image's URI, and the other fields of its line


class _BadLineError(Exception):
    """A line cannot be understood."""


def is_manifest(pattern: str) -> bool:
    """Whether an input is a list of images, by its name."""
    return pattern.lower().endswith(_MANIFEST_ENDINGS) or is_of_s3(pattern)


def read_manifest(path: str) -> Iterator[ImageRef | FoundFile | DeadLetter]:
    """The images of a manifest, or the objects of an inventory, which has all kinds, and a dead letter of each bad line.

    It does not check that they exist.

    Raises:
      InputError: It cannot be read.
    """
    folder = path.rsplit("/", 1)[0] if "/" in path else "."
    real = functools.lru_cache(_FOLDERS_KNOWN)(real_folder)
    try:
        with open_file(path) as file:
            for named in _of_s3_inventory(file, path) if is_of_s3(path) else named_images(file, path):
                if isinstance(named, (DeadLetter, FoundFile)):
                    yield named
                    continue
                uri, (extra, generation, size_bytes) = named[0], told_version(*named)
                name, text = full_name(_resolve(uri, folder), real), extra_text(extra) if extra else ""
                yield ImageRef(name, generation, size_bytes, extra=text)
    except ImageError as err:
        raise InputError(f"manifest {err}") from err


def _resolve(uri: str, folder: str) -> str:
    """A manifest's relative path is relative to the current folder, else to the manifest's own."""
    if "://" in uri or os.path.isabs(uri) or os.path.exists(file_of(uri)):
        return uri
    beside = f"{folder}/{uri}"
    return beside if "://" in folder or os.path.exists(file_of(beside)) else uri


def named_images(file: BinaryIO, path: str) -> Iterator[Named | FoundFile | DeadLetter]:
    """The URIs of a manifest with the other fields of their lines, and a dead letter of each bad line.

    .txt: one a line; what begins with # is a comment. .csv: the column `uri`, `path`, `file`, `filename` or `image`, else the
    first in which something looks like an image; the other cells by the header's names. .jsonl: a text, {"uri"}, {"path"} or
    {"image": {"uri"}} a line; so rows of results and dead letters are understood. .parquet: as .csv, with its own header.
    Inventories have the columns `bucket` and `name` (Storage Insights) or `key` (S3 Inventory), and give objects.

    Args:
      file: The manifest.
      path: Its name, which tells what it is.
    """
    ending = os.path.splitext(path)[1].lower()
    if ending in (".csv", ".parquet"):
        return _in_rows(_rows(file) if ending == ".csv" else _rows_of_parquet(file), path)
    return _in_lines(file, path, _in_json if ending == ".jsonl" else _in_text)


def _of_s3_inventory(file: BinaryIO, path: str) -> Iterator[Named | FoundFile | DeadLetter]:
    """What the files of an S3 Inventory name, whose `manifest.json` this is; keys in CSV files are URL-encoded.

    Raises:
      InputError: One of them is damaged; see `files_of_s3`.
    """
    parts, columns = files_of_s3(file, path)
    for part in parts:
        with open_file(part) as opened:
            if not columns:
                yield from _in_rows(_rows_of_parquet(opened), part)
                continue
            try:
                rows = _rows(gzip.GzipFile(fileobj=opened))  # type: ignore[arg-type]
                yield from _in_rows(itertools.chain([_Row(0, [""], columns)], rows), part, urllib.parse.unquote_plus)
            except (EOFError, zlib.error, gzip.BadGzipFile) as err:
                raise InputError(f"{part} is damaged: {one_line(err)}") from err


def _in_lines(file: BinaryIO, path: str, parse: Callable[[str], Named | None]) -> Iterator[Named | DeadLetter]:
    lines = _Lines(file)
    while True:
        try:
            if named := parse(next(lines)):
                if fault := _fault_of_name(named[0]):
                    raise _BadLineError(fault)
                yield named
        except StopIteration:
            return
        except _BadLineError as err:
            yield _bad_line(path, lines.number, str(err))


def _bad_line(path: str, number: int, why: str) -> DeadLetter:
    place, generation = f"{path}:{number}", hashlib.blake2b(why.encode(), digest_size=8).hexdigest()  # the same at each reading
    return Failure("read", "bad_line", f"{place}: {why}").dead_letter(ImageRef(place, generation))


class _Lines:
    """The lines of a manifest, of a bounded length; a bad one raises `_BadLineError`, and iteration can go on after it."""

    def __init__(self, file: BinaryIO) -> None:
        self.number = 0
        self._text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._text.readline(_LONGEST_LINE + 1)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) > _LONGEST_LINE:
            while line and not line.endswith(("\n", "\r")):
                line = self._text.readline(_LONGEST_LINE)
            raise _BadLineError(f"expected at most {_LONGEST_LINE} characters in a line")
        try:
            line.encode()
        except UnicodeEncodeError as err:
            raise _BadLineError(f"expected UTF-8 text, got {line[:80].encode('utf-8', 'surrogateescape')!r}") from err
        return line


def _fault_of_name(uri: str) -> str:
    """Why a manifest may not name an image so; a `file:` URI may spell its characters."""
    return bad_name(uri).message if CONTROL.search(urllib.parse.unquote(uri) if uri.lower().startswith("file:") else uri) else ""


def _in_text(line: str) -> Named | None:
    uri = line.strip(_BLANK)
    return (uri, {}) if uri and not uri.startswith("#") else None


class _Row(NamedTuple):
    """A row of a CSV file.

    Attributes:
      number: That of its first line.
      lines: Its lines; several, where a quoted cell has ends of lines, or is never closed.
      cells: Its cells; none if it has a fault.
      fault: Why it cannot be understood.
    """

    number: int
    lines: Sequence[str]
    cells: Sequence[str] = ()
    fault: str = ""


class _RowLines(_Lines):
    """The lines of a CSV file; `taken` are those of the row in progress, which may have as many characters as a line."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.taken: list[str] = []
        self._left = _LONGEST_LINE

    def begin_row(self) -> None:
        self.taken, self._left = [], _LONGEST_LINE

    def __next__(self) -> str:
        line = super().__next__()
        self.taken.append(line)
        self._left -= len(line)
        if self._left < 0:
            raise csv.Error(f"a row of more than {_LONGEST_LINE} characters")
        return line


def _rows(file: BinaryIO) -> Iterator[_Row]:
    """The rows of a CSV file without the empty ones."""
    lines = _RowLines(file)
    reader = csv.reader(lines)
    while True:
        lines.begin_row()
        number = lines.number + 1
        try:
            row = _Row(number, lines.taken, _cells(next(reader)))
        except StopIteration:
            return
        except csv.Error as err:
            row = _Row(number, lines.taken, fault=f"expected CSV: {err}")
        except _BadLineError as err:
            if lines.taken:  # of a row that is not closed
                yield _Row(number, lines.taken, fault=_NOT_CLOSED)
            row = _Row(lines.number, [""], fault=str(err))
        if row.cells or row.fault:
            yield row


def _cells(cells: Sequence[str]) -> list[str]:
    """The cells of a row without the blanks around them; none if all are empty."""
    cells = [cell.strip(_BLANK) for cell in cells]
    return cells if any(cells) else []


def _alone(number: int, line: str) -> _Row:
    """A line as a row of its own."""
    try:
        return _Row(number, [line], _cells(next(csv.reader([line]))))
    except csv.Error as err:
        return _Row(number, [line], fault=f"expected CSV: {err}")


def _rows_of_parquet(file: BinaryIO) -> Iterator[_Row]:
    """The header and the rows of a Parquet file, as those of a CSV file.

    Raises:
      InputError: It is no Parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        parquet = pq.ParquetFile(file)
        yield _Row(number, [""], parquet.schema_arrow.names)
        for batch in parquet.iter_batches(_ROWS_AT_ONCE):
            for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                number += 1
                yield _Row(number, [repr(values)], list(map(_text, values)))
    except (pa.ArrowException, OSError) as err:
        if getattr(err, "errno", None):
            raise
        raise InputError(f"a manifest that is damaged behind row {number}, or no Parquet file: {one_line(err)}") from err


def _text(value: Any) -> str:
    """A value of a Parquet file as a cell; texts may be bytes there."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else "" if value is None else str(value)


def _in_rows(rows: Iterator[_Row], path: str, decoded: Callable[[str], str] = str) -> Iterator[Named | FoundFile | DeadLetter]:
    """The URIs in rows of cells, each with the other non-empty cells by the header's names; a dead letter of each other row.

    A header has a column of a known name, or nothing in it looks like an image or a path, but something in the next row does.
    A quote that is not closed where it should be makes a cell of the lines behind it. If they look like rows, each is read alone.
    Of an inventory's versions of objects the latest one counts; `decoded` makes a name of what its column has.
    """
    leading = list(itertools.islice(rows, 2))
    first, second = (*(list(row.cells) for row in leading), [], [])[:2]
    names = [cell.lower() for cell in first]
    known = [names.index(name) for name in _NAMING if name in names]
    in_first, in_second = ([n for n, cell in enumerate(row) if "://" in cell or names_image(cell)] for row in (first, second))
    has_header = bool(known or (in_second and not in_first and not any("/" in cell for cell in first)))
    column = (known or in_first or (in_second if has_header else []) or [0])[0]
    objects = None if known else Objects.of(names)
    if objects:
        has_header, column = True, objects.name
    header, needed = first if has_header else [], (column, objects.bucket) if objects else (column,)

    def named_in(row: _Row) -> Iterator[Named | FoundFile | DeadLetter]:
        if len(row.lines) > 1 and (row.fault or _holds_rows(row, column, len(first))):
            yield _bad_line(path, row.number, _NOT_CLOSED)
            for number, line in enumerate(row.lines[1:], row.number + 1):
                if (alone := _alone(number, line)) and (alone.cells or alone.fault):
                    yield from named_in(alone)
        elif fault := _fault_of_row(row, needed, header) or _fault_of_name(name := decoded(row.cells[column])):
            yield _bad_line(path, row.number, fault)
        elif objects:
            yield objects.found(row.cells, name)
        else:
            others = enumerate(zip(header, row.cells))  # noqa: B905  a row may be shorter than the header, or longer
            fields = {title: cell for n, (title, cell) in others if n != column and title and cell}
            yield name, fields

    for row in itertools.chain(leading[has_header:], rows):
        if not objects or objects.has(row.cells):
            yield from named_in(row)


def _fault_of_row(row: _Row, columns: Sequence[int], header: Sequence[str]) -> str:
    """Why a row has no name of an image, which is in these columns; empty where it has one."""
    if row.fault:
        return row.fault
    for column in columns:
        if len(row.cells) <= column or not row.cells[column]:
            name = f" ({header[column]})" if header else ""
            return f"expected a URI in column {column + 1}{name}, got {row.lines[0][:80]!r}"
    return ""


def _holds_rows(row: _Row, column: int, width: int) -> bool:
    """Whether lines behind the first one of a row seem to be rows, too: a name has no end of line, and a row has all cells."""
    if any("\n" in cell or "\r" in cell for cell in row.cells[column : column + 1]):
        return True
    alone = (_alone(0, line).cells for line in row.lines[1:])
    return any(
        len(cells) == width and ("/" in cells[column] or names_image(cells[column])) for cells in alone if len(cells) > column
    )


def _in_json(line: str) -> Named | None:
    text = line.strip()
    if not text:
        return None
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise _BadLineError(f"expected JSON, got {text[:80]!r}") from err
    row = row if isinstance(row, dict) else {"uri": row}
    if row.get("reason") == "bad_line":
        raise _BadLineError("the dead letter of a bad line; fix the line, and give its manifest as --input again")
    if "payload_base64" in row:
        raise _BadLineError("a dead letter that carries its message; --retry-dead tries it again, with its folder as --output")
    image, is_row = row.get("image", row), isinstance(row.get("image"), dict)
    uri = (image.get("uri") or image.get("path")) if isinstance(image, dict) else image
    record = row.get("record") if is_row and "stage" in row else None  # the place of a dead letter's image in a TFRecord file
    uri = record if isinstance(record, str) and record_range(record) else uri
    if not isinstance(uri, str) or not uri:
        raise _BadLineError(f'expected a URI as a text, {{"uri": …}} or {{"image": {{"uri": …}}}}, got {text[:80]!r}')
    if is_row:
        return uri, extra_columns((), {"extra": row.get("extra")})
    generation = {"generation": row["generation"]} if row.get("generation") and uri.startswith(LISTED) else {}
    return uri, {**extra_columns(_OURS, row), **generation}
