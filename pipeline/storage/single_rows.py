"""One row an image generation and model version, out of any number of files of rows.

Lines of one image lie together in the merge of sorted files, since a row begins with its image: first the rows of each version,
then its dead letters, at last the dead letters that know no version. So nothing is held but the best rows of one version.

Which rows stay:

- Of equal rows one, and of rows of one image generation and model version that differ the newest: who detected the image
  again, with other settings for instance, wants the new result.
- A row beats a dead letter of the same image generation, if that came of the same model version or of one that is not known.
- A dead letter that knows no version goes once there is a row of the image, of that model, as new as itself or newer.
- A dead letter that names no image (a message that could not be understood) stays.

The index of a file has the age of each row, so that neither a copy of the files nor a merge with newer ones changes it. Where an
index has none, all rows of the file are as old as the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from pipeline.storage.completion import Entry, Provenance
from pipeline.storage.files import read_lines
from pipeline.storage.ledger import RowsFile, entry_of, read_entries
from pipeline.storage.results import DETECTIONS
from pipeline.storage.spill_files import merge_lines

_SEPARATOR = b"\x1f"  # no line of JSON has one; in a line that is none, the last one counts


class SingleRow(NamedTuple):
    """A row that stays.

    Attributes:
      kind: `detections` or `dead_letters`.
      line: As it stands in its file, with its end.
      entry: What the ledger says of it; None where it names no image.
      age: When it was made, or its file was: the larger, the newer. Of equal rows that of the newest.
    """

    kind: str
    line: bytes
    entry: Entry | None
    age: float


def single_rows(
    files: Iterable[tuple[float, RowsFile]], folder: str, count: Callable[[], None] | None = None
) -> Iterator[SingleRow]:
    """The rows that stay, of each kind in order.

    Args:
      files: Sorted files of rows, each with the age of its rows whose index does not say it.
      folder: Where files of merged lines go, if there are too many to be read at once.
      count: Called for each row that is read.
    """
    sources = _Sources(files, count or (lambda: None))
    lines = merge_lines(sources.paths, folder, sources.read)
    folded = (_fold(map(sources.row, equal)) for _, equal in groupby(lines, sources.line))
    for _, of_image in groupby(folded, lambda row: row.entry.uri if row.entry else None):
        yield from _of_image(of_image)


class _Sources:
    """Files whose lines carry with them what only their file, or its index, tells of them."""

    def __init__(self, files: Iterable[tuple[float, RowsFile]], count: Callable[[], None]):
        self._count = count
        self._files = {file.path: (age, file) for age, file in files}
        self._numbers: dict[tuple[str, Provenance], int] = {}
        self._told: list[tuple[str, Provenance]] = []

    @property
    def paths(self) -> list[str]:
        return list(self._files)

    def read(self, path: str) -> Iterator[bytes]:
        """The lines of a file, each with its age behind it, and a number that stands for what else is told of it."""
        file_age, file = self._files[path]
        entries = read_entries(file)
        for line in read_lines(path):
            self._count()
            known = entry_of(line, file.kind, Provenance()) and next(entries, None)
            provenance = Provenance(known.settings, known.settings, known.model, known.version) if known else Provenance()
            age = (known and known.made_at) or file_age
            yield b"%s%s%d %a\n" % (line.rstrip(b"\n"), _SEPARATOR, self._number((file.kind, provenance)), age)

    def _number(self, told: tuple[str, Provenance]) -> int:
        if told not in self._numbers:
            self._numbers[told] = len(self._told)
            self._told.append(told)
        return self._numbers[told]

    @staticmethod
    def line(numbered: bytes) -> bytes:
        """The line as it stands in its file, but for its end."""
        return numbered.rpartition(_SEPARATOR)[0]

    def row(self, numbered: bytes) -> SingleRow:
        line, _, told = numbered.rpartition(_SEPARATOR)
        number, age = told.split()
        kind, provenance = self._told[int(number)]
        return SingleRow(kind, line + b"\n", entry_of(line, kind, provenance), float(age))


def _fold(equal: Iterable[SingleRow]) -> SingleRow:
    """One row of equal ones: as new as the newest, of whose provenance is known."""
    rows = list(equal)
    known = max(rows, key=lambda row: (row.entry is not None and row.entry.settings != "", row.age))
    return known._replace(age=max(row.age for row in rows))


def _of_image(rows: Iterable[SingleRow]) -> Iterator[SingleRow]:
    """What stays of all rows of one URI, by its versions; of rows that name no image, all."""
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
    """Whether a row says what a dead letter could not."""
    model = _model(letter)
    if generation:
        return model in here if any(model) else bool(here)
    ages = [age for of_model, age in newest.items() if of_model == model or not any(model)]
    return any(age >= letter.age for age in ages)


def _model(row: SingleRow) -> tuple[str, str]:
    return (row.entry.model, row.entry.version) if row.entry else ("", "")
