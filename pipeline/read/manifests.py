"""Manifests: lists of images, as text, CSV or JSON Lines."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.errors import InputError
from pipeline.extra_fields import extra_text, said_beyond
from pipeline.failures import ImageError
from pipeline.read.fetch import open_file, storage_failures
from pipeline.read.tfrecords import is_tfrecord
from pipeline.records import ImageRef

_MANIFEST_ENDINGS = (".txt", ".csv", ".jsonl")
_IMAGE_NAME = re.compile(r"\.(jpe?g|jpe|png|bmp|gif|webp|tiff?|avif|hei[cf]|jp2|p[bgpn]m|hdr|(tf)?records?)$", re.IGNORECASE)
_NAMING = ("uri", "path", "file", "filename", "image")  # columns that name the image, the best first
_OURS = frozenset({"uri", "path", "image", "generation"})
_LONGEST_LINE = 64 << 20  # a dead letter may have its image within

Named = tuple[str, Mapping[str, Any]]  # an image's URI, and what else is said of it


def is_manifest(pattern: str) -> bool:
    """Whether an input is a list of images, by its name."""
    return pattern.lower().endswith(_MANIFEST_ENDINGS)


def read_manifest(path: str) -> Iterator[ImageRef]:
    """The images that a manifest names; whether they are there shows when they are read.

    Raises:
      InputError: It cannot be read or understood.
    """
    folder = path.rsplit("/", 1)[0] if "/" in path else "."
    try:
        with storage_failures(path), open_file(path) as file:
            for uri, extra in named_images(_lines(file), path, lambda uri: os.path.isfile(_resolve(uri, folder))):
                yield ImageRef(_resolve(uri, folder), extra=extra_text(extra) if extra else "")
    except ImageError as err:
        raise InputError(f"manifest {err}") from err


def is_manifest_of_rows(path: str) -> bool:
    """Whether a `.jsonl` file that nobody called a manifest is one: by its first line, as a person would tell."""
    if not path.lower().endswith(".jsonl"):
        return False
    try:
        with storage_failures(path), open_file(path) as file:
            return any(True for _ in named_images(_lines(file), path, lambda _: False))
    except (ImageError, InputError):
        return False


def named_images(lines: Iterable[str], path: str, is_file: Callable[[str], bool]) -> Iterator[Named]:
    """The images of a manifest, by the URIs that stand there, and what else is said of each.

    .txt: one a line; what begins with # is a comment. .csv: the column `uri`, `path`, `file`, `filename` or `image`, else the
    first in which something looks like an image; the other cells by the header's names. .jsonl: a text, {"uri"}, {"path"} or
    {"image": {"uri"}} a line; so rows of results and dead letters are understood.

    Args:
      lines: The manifest.
      path: Its name, which tells what it is.
      is_file: Whether a path is that of a local file.

    Raises:
      InputError: It cannot be understood.
    """
    ending = os.path.splitext(path)[1].lower()
    try:
        if ending == ".csv":
            yield from _in_csv(csv.reader(lines), lambda cell: "://" in cell or bool(_IMAGE_NAME.search(cell)) or is_file(cell))
        elif ending == ".jsonl":
            texts = ((number, line.strip()) for number, line in enumerate(lines, 1))
            yield from (_in_json(text, f"manifest {path}, line {number}") for number, text in texts if text)
        else:
            yield from ((text, {}) for text in map(str.strip, lines) if text and not text.startswith("#"))
    except (UnicodeDecodeError, csv.Error) as err:
        raise InputError(f"manifest {path}: expected UTF-8 text with one URI a line: {err}") from err


def _lines(file: Any) -> Iterator[str]:
    """Lines of a file; one that has no end does not fill the memory."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    return iter(lambda: text.readline(_LONGEST_LINE), "")


def _in_csv(rows: Iterator[list[str]], looks_like_image: Callable[[str], bool]) -> Iterator[Named]:
    """The cells of a column, with the other cells of their rows by the header's names, but for empty ones."""
    filled = filter(any, ([cell.strip() for cell in row] for row in rows))
    first, second = next(filled, []), next(filled, [])
    column, has_header = _uri_column(first, second, looks_like_image)
    header = first if has_header else []
    for cells in itertools.chain([second] if has_header else [first, second], filled):
        if len(cells) > column and cells[column]:
            others = enumerate(zip(header, cells))  # noqa: B905  a row may be shorter than the header, or longer
            yield cells[column], {name: cell for place, (name, cell) in others if place != column and name and cell}


def _uri_column(first: Sequence[str], second: Sequence[str], looks_like_image: Callable[[str], bool]) -> tuple[int, bool]:
    """In which column the URIs are, and whether the first row is a header.

    A header has a column of a known name; else nothing in it looks like an image or a path, but something in the next row does.
    """
    names = [cell.lower() for cell in first]
    for name in _NAMING:
        if name in names:
            return names.index(name), True
    in_first = [column for column, cell in enumerate(first) if looks_like_image(cell)]
    in_second = [column for column, cell in enumerate(second) if looks_like_image(cell)]
    is_header = bool(in_second) and not in_first and not any("/" in cell for cell in first)
    return next(iter(in_second if is_header else in_first), 0), is_header


def _in_json(text: str, where: str) -> Named:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise InputError(f"{where}: expected JSON, got {text[:80]!r}") from err
    row = row if isinstance(row, dict) else {"uri": row}
    image = row.get("image", row)
    uri = _record_of(row) or ((image.get("uri") or image.get("path")) if isinstance(image, dict) else image)
    if not isinstance(uri, str) or not uri:
        raise InputError(f'{where}: expected a URI as a text, {{"uri": …}} or {{"image": {{"uri": …}}}}, got {text[:80]!r}')
    return uri, _said_in(row)


def _record_of(row: Mapping[str, Any]) -> str:
    """Where the image of a dead letter lies in a TFRecord file; empty for another row."""
    record = row.get("record") if isinstance(row.get("image"), dict) and "stage" in row else None
    return record if isinstance(record, str) and is_tfrecord(record) else ""


def _said_in(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a row says of its image: of one of ours its `extra`, of another all but the name."""
    of_ours = isinstance(row.get("image"), dict)
    return said_beyond((), {"extra": row.get("extra")}) if of_ours else said_beyond(_OURS, row)


def _resolve(uri: str, folder: str) -> str:
    """A manifest's relative path is relative to the current folder, else to the manifest's own."""
    if "://" in uri or os.path.isabs(uri) or os.path.exists(uri):
        return uri
    beside = f"{folder}/{uri}"
    return beside if "://" in folder or os.path.exists(beside) else uri
