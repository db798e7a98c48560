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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from pipeline.errors import InputError
from pipeline.extra_fields import extra_columns, extra_text
from pipeline.failures import ImageError
from pipeline.read.fetch import open_file
from pipeline.read.names import file_of, full_name, names_image, record_range
from pipeline.records import DeadLetter, ImageRef
from pipeline.storage.globs import real_folder

_MANIFEST_ENDINGS = (".txt", ".csv", ".jsonl")
_NAMING = ("uri", "path", "file", "filename", "image")  # columns that name the image, the best first
_OURS = frozenset({"uri", "path", "image", "generation"})
_FOLDERS_KNOWN = 4096
_LONGEST_LINE = 1 << 20  # characters; as JSON it may take 25 times as many bytes
_BLANK = " \t\r\n"  # around a name; other spaces of Unicode belong to it

Named = tuple[str, Mapping[str, Any]]  # an image's URI, and the other fields of its line


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
        with open_file(path) as file:
            for named in named_images(file, path):
                if isinstance(named, DeadLetter):
                    yield named
                    continue
                uri, extra = named
                yield ImageRef(full_name(_resolve(uri, folder), real), extra=extra_text(extra) if extra else "")
    except ImageError as err:
        raise InputError(f"manifest {err}") from err


def _resolve(uri: str, folder: str) -> str:
    """A manifest's relative path is relative to the current folder, else to the manifest's own."""
    if "://" in uri or os.path.isabs(uri) or os.path.exists(file_of(uri)):
        return uri
    beside = f"{folder}/{uri}"
    return beside if "://" in folder or os.path.exists(file_of(beside)) else uri


def named_images(file: BinaryIO, path: str) -> Iterator[Named | DeadLetter]:
    """The URIs of a manifest with the other fields of their lines, and a dead letter of each bad line.

    .txt: one a line; what begins with # is a comment. .csv: the column `uri`, `path`, `file`, `filename` or `image`, else the
    first in which something looks like an image; the other cells by the header's names. .jsonl: a text, {"uri"}, {"path"} or
    {"image": {"uri"}} a line; so rows of results and dead letters are understood.

    Args:
      file: The manifest.
      path: Its name, which tells what it is.
    """
    ending = os.path.splitext(path)[1].lower()
    lines = _Lines(file)
    rows: Iterator[Any] = csv.reader(lines) if ending == ".csv" else lines
    parsers: dict[str, Callable[[Any], Any]] = {".csv": _in_csv, ".jsonl": _in_json}
    parse = parsers.get(ending, _in_text)

    def parsed() -> Iterator[Any]:
        while True:
            try:
                if row := parse(next(rows)):
                    yield row
            except StopIteration:
                return
            except (csv.Error, _BadLineError) as err:
                place, why = f"{path}:{lines.number}", f"expected CSV: {err}" if isinstance(err, csv.Error) else str(err)
                generation = hashlib.blake2b(why.encode(), digest_size=8).hexdigest()  # the same whenever it is read
                yield ImageError("read", "bad_line", f"{place}: {why}").dead_letter(ImageRef(place, generation))

    return _of_columns(parsed()) if ending == ".csv" else parsed()


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


def _in_text(line: str) -> Named | None:
    uri = line.strip(_BLANK)
    return (uri, {}) if uri and not uri.startswith("#") else None


def _in_csv(cells: list[str]) -> list[str] | None:
    cells = [cell.strip(_BLANK) for cell in cells]
    return cells if any(cells) else None


def _of_columns(rows: Iterator[list[str] | DeadLetter]) -> Iterator[Named | DeadLetter]:
    """The URIs in rows of cells, each with the other non-empty cells by the header's names.

    A header has a column of a known name, or nothing in it looks like an image or a path, but something in the next row does.
    """
    leading: list[list[str]] = []
    for row in rows:
        if isinstance(row, DeadLetter):
            yield row
            continue
        leading.append(row)
        if len(leading) == 2:
            break
    first, second = (*leading, [], [])[:2]
    names = [cell.lower() for cell in first]
    known = [names.index(name) for name in _NAMING if name in names]
    in_first, in_second = ([n for n, cell in enumerate(row) if "://" in cell or names_image(cell)] for row in (first, second))
    has_header = bool(known or (in_second and not in_first and not any("/" in cell for cell in first)))
    column = (known or in_first or (in_second if has_header else []) or [0])[0]
    header = first if has_header else []
    for row in itertools.chain(leading, rows):
        if isinstance(row, DeadLetter):
            yield row
        elif row is not header and len(row) > column and row[column]:
            others = enumerate(zip(header, row))  # noqa: B905  a row may be shorter than the header, or longer
            yield row[column], {name: cell for n, (name, cell) in others if n != column and name and cell}


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
    return uri, extra_columns((), {"extra": row.get("extra")}) if is_row else extra_columns(_OURS, row)
