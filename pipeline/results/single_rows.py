"""Deduplication by merge: one row for each image generation and model version, from any number of sorted files of rows.

A row begins with its image, so the merge brings all lines of one image together: the rows of each version, then its dead letters,
then the dead letters without a version. So only the best rows of one version are in memory.

Which rows stay:

- Of equal rows, one. Of different rows of one image generation and model version, the newest: a user who detects an image again,
  with other settings for instance, wants the new result.
- A row wins over a dead letter of the same image generation, if the dead letter has the same model version or none.
- A dead letter without an image generation goes if the image has a row of that model that is not older.
- A dead letter without an image (a message that could not be parsed) stays.

The index of a file has the age of each row, so neither a copy of the files nor a merge with newer ones changes it. Without an
index, all rows of a file are as old as the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from pipeline.results.completion import Entry, Provenance
from pipeline.results.layout import DETECTIONS
from pipeline.results.ledger import RowsFile, entry_of, read_entries
from pipeline.storage.files import read_lines
from pipeline.storage.spill_files import merge_lines

_SEPARATOR = b"\x1f"  # no line of JSON has one; in a line that is none, the last one counts


class SingleRow(NamedTuple):
    """A row that stays.

    Attributes:
      kind: `detections` or `dead_letters`.
      line: The line in its file, with its end.
      entry: Its entry in the ledger; None if it names no image.
      age: When the row or its file was made; of equal rows, that of the newest.
    """

    kind: str
    line: bytes
    entry: Entry | None
    age: float


def single_rows(
    files: Iterable[tuple[float, RowsFile]], folder: str, count: Callable[[bytes], None] | None = None
) -> Iterator[SingleRow]:
    """The rows that stay, of each kind in order.

    Args:
      files: Sorted files of rows, each with the age of its rows whose index does not have it.
      folder: Where files of merged lines go, if there are too many to be read at once.
      count: Called with each line that is read.
    """
    sources = _Sources(files, count or (lambda _line: None))
    lines = merge_lines(sources.paths, folder, sources.read)
    folded = (_fold(map(sources.row, equal)) for _, equal in groupby(lines, sources.line))
    for _, of_image in groupby(folded, lambda row: row.entry.uri if row.entry else None):
        yield from _of_image(of_image)


class _Sources:
    """Files whose lines carry along what only their file or its index knows."""

    def __init__(self, files: Iterable[tuple[float, RowsFile]], count: Callable[[bytes], None]):
        self._count = count
        self._files = {file.path: (age, file) for age, file in files}
        self._numbers: dict[tuple[str, Provenance], int] = {}
        self._known: list[tuple[str, Provenance]] = []

    @property
    def paths(self) -> list[str]:
        return list(self._files)

    def read(self, path: str) -> Iterator[bytes]:
        """The lines of a file, each followed by its age and the number of its kind and provenance."""
        file_age, file = self._files[path]
        entries = read_entries(file)
        for line in read_lines(path):
            self._count(line)
            known = entry_of(line, file.kind, Provenance()) and next(entries, None)
            provenance = Provenance(known.settings, known.settings, known.model, known.version) if known else Provenance()
            age = (known and known.made_at) or file_age
            yield b"%s%s%d %a\n" % (line.rstrip(b"\n"), _SEPARATOR, self._number((file.kind, provenance)), age)

    def _number(self, known_by: tuple[str, Provenance]) -> int:
        if known_by not in self._numbers:
            self._numbers[known_by] = len(self._known)
            self._known.append(known_by)
        return self._numbers[known_by]

    @staticmethod
    def line(numbered: bytes) -> bytes:
        """The line in its file, without its end."""
        return numbered.rpartition(_SEPARATOR)[0]

    def row(self, numbered: bytes) -> SingleRow:
        line, _, known_by = numbered.rpartition(_SEPARATOR)
        number, age = known_by.split()
        kind, provenance = self._known[int(number)]
        return SingleRow(kind, line + b"\n", entry_of(line, kind, provenance), float(age))


def _fold(equal: Iterable[SingleRow]) -> SingleRow:
    """One of several equal rows: with the age of the newest, and with provenance if one has it."""
    rows = list(equal)
    known = max(rows, key=lambda row: (row.entry is not None and row.entry.settings != "", row.age))
    return known._replace(age=max(row.age for row in rows))


def _of_image(rows: Iterable[SingleRow]) -> Iterator[SingleRow]:
    """The rows of one URI that stay, by version; rows without an image all stay."""
    newest: dict[tuple[str, str], float] = {}  # of each model that has a row of any version of the image
    for generation, of_version in groupby(rows, lambda row: row.entry.generation if row.entry else None):
        if generation is None:
            yield from of_version
            continue
        best: dict[tuple[str, ...], SingleRow] = {}
        for row in of_version:
            key = (row.kind, *_model(row))
            best[key] = max(best.get(key, row), row, key=lambda row: (row.age, row.line))
        for row in best.values():
            if row.kind == DETECTIONS:
                newest[_model(row)] = max(row.age, newest.get(_model(row), row.age))
        here = {_model(row) for row in best.values() if row.kind == DETECTIONS}
        for row in sorted(best.values(), key=lambda row: row.line):
            if row.kind == DETECTIONS or not _is_mended(row, generation, here, newest):
                yield row


def _is_mended(letter: SingleRow, generation: str, here: set[tuple[str, str]], newest: dict[tuple[str, str], float]) -> bool:
    """Whether a row replaces a dead letter."""
    model = _model(letter)
    if generation:
        return model in here if any(model) else bool(here)
    ages = [age for of_model, age in newest.items() if of_model == model or not any(model)]
    return any(age >= letter.age for age in ages)


def _model(row: SingleRow) -> tuple[str, str]:
    return (row.entry.model, row.entry.version) if row.entry else ("", "")
