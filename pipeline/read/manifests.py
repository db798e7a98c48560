"""Manifests: lists of images, as text, CSV or JSON Lines."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator

from apache_beam.io.filesystems import FileSystems

from pipeline.errors import InputError
from pipeline.records import ImageRef
from pipeline.storage.globs import expand_pattern

_MANIFEST_ENDINGS = (".txt", ".csv", ".jsonl")


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
                for uri in _manifest_uris(lines, name):
                    yield ImageRef(_resolve(uri, folder))
            except (UnicodeDecodeError, csv.Error) as err:
                raise InputError(f"manifest {name}: expected UTF-8 text with one URI a line: {err}") from err


def _manifest_uris(lines: Iterable[str], path: str) -> Iterator[str]:
    """URIs of a manifest.

    .txt: one a line. .csv: the column `uri` or `path`, else the first. .jsonl: a text, {"uri"} or {"image": {"uri"}} a line.
    """
    if path.lower().endswith(".csv"):
        column = 0
        for number, row in enumerate(csv.reader(lines)):
            names = [cell.strip().lower() for cell in row]
            header = [name for name in ("uri", "path", "file", "filename", "image") if name in names] if number == 0 else []
            if header:
                column = names.index(header[0])
            elif len(row) > column and row[column].strip():
                yield row[column].strip()
        return
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and path.lower().endswith(".jsonl"):
            yield _json_uri(text, f"manifest {path}, line {number}")
        elif text and not text.startswith("#"):
            yield text


def _json_uri(text: str, where: str) -> str:
    try:
        row = json.loads(text)
        row = row.get("image", row) if isinstance(row, dict) else row
        uri = (row.get("uri") or row.get("path")) if isinstance(row, dict) else row
    except ValueError as err:
        raise InputError(f"{where}: expected JSON, got {text[:80]!r}") from err
    if not isinstance(uri, str) or not uri:
        raise InputError(f'{where}: expected a URI as a text, {{"uri": …}} or {{"image": {{"uri": …}}}}, got {text[:80]!r}')
    return uri


def _resolve(uri: str, folder: str) -> str:
    """A manifest's relative path is relative to the current folder, else to the manifest's own."""
    if "://" in uri or os.path.isabs(uri) or os.path.exists(uri):
        return uri
    beside = f"{folder}/{uri}"
    return beside if "://" in folder or os.path.exists(beside) else uri
