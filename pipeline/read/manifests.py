"""Manifests: lists of images, as text, CSV or JSON Lines.

A line that names no image becomes one dead letter, named after its place, `<manifest>:<line>`; the other lines are read. Memory
holds one line at a time, of a bounded length.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pipeline.errors import InputError
from pipeline.extra_fields import extra_columns, extra_text
from pipeline.failures import ImageError
from pipeline.read.containers import file_of, full_name
from pipeline.read.fetch import open_file, storage_failures
from pipeline.read.image_names import names_image
from pipeline.read.tfrecords import is_tfrecord
from pipeline.records import DeadLetter, ImageRef
from pipeline.storage.globs import real_folder

_MANIFEST_ENDINGS = (".txt", ".csv", ".jsonl")
_NAMING = ("uri", "path", "file", "filename", "image")  # columns that name the image, the best first
_OURS = frozenset({"uri", "path", "image", "generation"})
_FOLDERS_KNOWN = 4096
_LONGEST_LINE = 1 << 20  # characters; as JSON it may take 25 times as many bytes

Named = tuple[str, Mapping[str, Any]]  # an image's URI, and what else is said of it


class _BadLineError(Exception):
    """A line cannot be understood."""


def is_manifest(pattern: str) -> bool:
    """Whether an input is a list of images, by its name."""
    return pattern.lower().endswith(_MANIFEST_ENDINGS)


def read_manifest(path: str) -> Iterator[ImageRef | DeadLetter]:
    """The images of a manifest, and a dead letter of each bad line; does not check that the images exist.

    Raises:
      InputError: It cannot be read.
    """
    folder = path.rsplit("/", 1)[0] if "/" in path else "."
    real = functools.lru_cache(_FOLDERS_KNOWN)(real_folder)
    try:
        with storage_failures(path), open_file(path) as file:
            for named in named_images(_lines(file), path):
                if isinstance(named, DeadLetter):
                    yield named
                    continue
                uri, extra = named
                yield ImageRef.of_uri(full_name(_resolve(uri, folder), real), extra=extra_text(extra) if extra else "")
    except ImageError as err:
        raise InputError(f"manifest {err}") from err


def named_images(lines: Iterable[str], path: str) -> Iterator[Named | DeadLetter]:
    """The URIs of a manifest with the other fields of their lines, and a dead letter of each bad line.

    .txt: one a line; what begins with # is a comment. .csv: the column `uri`, `path`, `file`, `filename` or `image`, else the
    first in which something looks like an image; the other cells by the header's names. .jsonl: a text, {"uri"}, {"path"} or
    {"image": {"uri"}} a line; so rows of results and dead letters are understood.

    Args:
      lines: The manifest; bytes that are no UTF-8 as `surrogateescape` has them.
      path: Its name, which tells what it is.
    """
    ending = os.path.splitext(path)[1].lower()
    texts = _Texts(lines, path)
    if ending == ".csv":
        rows = _with_bad_lines(csv.reader(texts), texts, lambda row: [cell.strip() for cell in row])
        return _in_csv(rows)
    return _with_bad_lines(texts, texts, _in_json if ending == ".jsonl" else _in_text)


class _Texts:
    """The lines of a manifest; a bad line raises `_BadLineError`, and iteration can go on after it."""

    def __init__(self, lines: Iterable[str], path: str) -> None:
        self._number = 0
        self._path = path
        self._lines = iter(lines)

    def __iter__(self) -> _Texts:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self._number += 1
        if len(line) > _LONGEST_LINE:
            raise _BadLineError(f"expected at most {_LONGEST_LINE} characters in a line")
        if not line.isascii():
            try:
                line.encode()
            except UnicodeEncodeError as err:
                came = line[:80].encode("utf-8", "surrogateescape")
                raise _BadLineError(f"expected UTF-8 text, got {came!r}") from err
        return line

    def bad_line(self, why: str) -> DeadLetter:
        """The dead letter of the last line; the same each time that the manifest is read."""
        place, generation = f"{self._path}:{self._number}", hashlib.blake2b(why.encode(), digest_size=8).hexdigest()
        return ImageError("read", "bad_line", f"{place}: {why}").dead_letter(ImageRef(place, generation))


_Row = TypeVar("_Row")
_Parsed = TypeVar("_Parsed")


def _with_bad_lines(
    rows: Iterator[_Row], texts: _Texts, parse: Callable[[_Row], _Parsed | None]
) -> Iterator[_Parsed | DeadLetter]:
    """The parsed rows, without empty ones, and the bad lines in their places."""
    while True:
        try:
            if parsed := parse(next(rows)):
                yield parsed
        except StopIteration:
            return
        except csv.Error as err:
            yield texts.bad_line(f"expected CSV: {err}")
        except _BadLineError as err:
            yield texts.bad_line(str(err))


def _lines(file: Any) -> Iterator[str]:
    """Lines of a file; one that is too long is cut just above the limit."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    while line := text.readline(_LONGEST_LINE + 1):
        yield line
        while len(line) > _LONGEST_LINE and not line.endswith(("\n", "\r")):
            line = text.readline(_LONGEST_LINE + 1)


def _in_text(line: str) -> Named | None:
    uri = line.strip()
    return (uri, {}) if uri and not uri.startswith("#") else None


def _in_csv(rows: Iterator[list[str] | DeadLetter]) -> Iterator[Named | DeadLetter]:
    """The URIs of a column, each with the other non-empty cells of its row by the header's names."""
    begun: list[list[str]] = []
    for row in rows:
        if isinstance(row, DeadLetter):
            yield row
        elif any(row):
            begun.append(row)
            if len(begun) == 2:
                break
    first, second = (*begun, [], [])[:2]
    column, has_header = _uri_column(first, second)
    header = first if has_header else []
    for cells in itertools.chain(begun[has_header:], rows):
        if isinstance(cells, DeadLetter):
            yield cells
        elif len(cells) > column and cells[column]:
            others = enumerate(zip(header, cells))  # noqa: B905  a row may be shorter than the header, or longer
            yield cells[column], {name: cell for place, (name, cell) in others if place != column and name and cell}


def _uri_column(first: Sequence[str], second: Sequence[str]) -> tuple[int, bool]:
    """The column of the URIs, and whether the first row is a header.

    A header has a column of a known name; else nothing in it looks like an image or a path, but something in the next row does.
    """
    names = [cell.lower() for cell in first]
    for name in _NAMING:
        if name in names:
            return names.index(name), True
    in_first, in_second = (
        [column for column, cell in enumerate(row) if "://" in cell or names_image(cell)] for row in (first, second)
    )
    is_header = bool(in_second) and not in_first and not any("/" in cell for cell in first)
    return next(iter(in_second if is_header else in_first), 0), is_header


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
        raise _BadLineError("the dead letter of a bad line; mend that, and give its manifest as --input again")
    if "payload_base64" in row:
        raise _BadLineError("a dead letter that carries its message; --retry-dead tries it again, with its folder as --output")
    image = row.get("image", row)
    uri = _record_of(row) or ((image.get("uri") or image.get("path")) if isinstance(image, dict) else image)
    if not isinstance(uri, str) or not uri:
        raise _BadLineError(f'expected a URI as a text, {{"uri": …}} or {{"image": {{"uri": …}}}}, got {text[:80]!r}')
    return uri, _said_in(row)


def _record_of(row: Mapping[str, Any]) -> str:
    """The place of a dead letter's image in a TFRecord file; empty for other rows."""
    record = row.get("record") if isinstance(row.get("image"), dict) and "stage" in row else None
    return record if isinstance(record, str) and is_tfrecord(record) else ""


def _said_in(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The other fields of a row: `extra` of this program's rows, all but the name of others."""
    of_ours = isinstance(row.get("image"), dict)
    return extra_columns((), {"extra": row.get("extra")}) if of_ours else extra_columns(_OURS, row)


def _resolve(uri: str, folder: str) -> str:
    """A manifest's relative path is relative to the current folder, else to the manifest's own."""
    if "://" in uri or os.path.isabs(uri) or os.path.exists(file_of(uri)):
        return uri
    beside = f"{folder}/{uri}"
    return beside if "://" in folder or os.path.exists(file_of(beside)) else uri
