"""Manifests: lists of images, as text, CSV or JSON Lines."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from apache_beam.io.filesystems import FileSystems

from pipeline.errors import InputError
from pipeline.extra_fields import extra_text
from pipeline.records import ImageRef
from pipeline.storage.globs import expand_pattern

_MANIFEST_ENDINGS = (".txt", ".csv", ".jsonl")
_NAMING = ("uri", "path", "file", "filename", "image")  # columns that name the image, the best first
_OURS = frozenset({"uri", "path", "image", "generation", "extra"})

Named = tuple[str, Mapping[str, Any]]  # an image's URI, and what else is said of it


def is_manifest(pattern: str) -> bool:
    """Whether an input is a list of images, by its name."""
    return pattern.lower().endswith(_MANIFEST_ENDINGS)


def read_manifest(path: str) -> Iterator[ImageRef]:
    """The images that a manifest, or each that matches a pattern, names; whether they are there shows when they are read.

    Raises:
      InputError: It cannot be understood.
    """
    found = [entry.path for match in FileSystems.match(expand_pattern(path)) for entry in match.metadata_list]
    for name in [path] if os.path.isfile(path) else found:
        folder = name.rsplit("/", 1)[0] if "/" in name else "."
        with FileSystems.open(name) as file:
            lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            try:
                for uri, extra in _named_images(lines, name):
                    yield ImageRef(_resolve(uri, folder), extra=extra_text(extra) if extra else "")
            except (UnicodeDecodeError, csv.Error) as err:
                raise InputError(f"manifest {name}: expected UTF-8 text with one URI a line: {err}") from err


def _named_images(lines: Iterable[str], path: str) -> Iterator[Named]:
    """The images of a manifest, and what else is said of each.

    .txt: one a line. .csv: the column `uri` or `path`, else the first. .jsonl: a text, {"uri"} or {"image": {"uri"}} a line.
    """
    if path.lower().endswith(".csv"):
        yield from _in_csv(csv.reader(lines))
        return
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and path.lower().endswith(".jsonl"):
            yield _in_json(text, f"manifest {path}, line {number}")
        elif text and not text.startswith("#"):
            yield text, {}


def _in_csv(rows: Iterator[list[str]]) -> Iterator[Named]:
    """The cells of a column, with the other cells of their rows by the header's names, but for empty ones."""
    column, header = 0, list[str]()
    for number, row in enumerate(rows):
        cells = [cell.strip() for cell in row]
        names = [cell.lower() for cell in cells]
        known = [name for name in _NAMING if name in names] if number == 0 else []
        if known:
            column, header = names.index(known[0]), cells
        elif len(cells) > column and cells[column]:
            others = enumerate(zip(header, cells))  # noqa: B905  a row may be shorter than the header, or longer
            yield cells[column], {name: cell for place, (name, cell) in others if place != column and name and cell}


def _in_json(text: str, where: str) -> Named:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise InputError(f"{where}: expected JSON, got {text[:80]!r}") from err
    row = row if isinstance(row, dict) else {"uri": row}
    image = row.get("image", row)
    uri = (image.get("uri") or image.get("path")) if isinstance(image, dict) else image
    if not isinstance(uri, str) or not uri:
        raise InputError(f'{where}: expected a URI as a text, {{"uri": …}} or {{"image": {{"uri": …}}}}, got {text[:80]!r}')
    return uri, _said_in(row)


def _said_in(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a row says of its image: of one of ours its `extra`, of another all but the name."""
    extra = row.get("extra")
    said = {"extra": extra} if extra and not isinstance(extra, dict) else extra or {}
    if isinstance(row.get("image"), dict):
        return said
    return {name: value for name, value in row.items() if name not in _OURS} | said


def _resolve(uri: str, folder: str) -> str:
    """A manifest's relative path is relative to the current folder, else to the manifest's own."""
    if "://" in uri or os.path.isabs(uri) or os.path.exists(uri):
        return uri
    beside = f"{folder}/{uri}"
    return beside if "://" in folder or os.path.exists(beside) else uri
