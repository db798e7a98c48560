"""Exports: the rows of detections that count in a results folder, in other formats, at any time.

A file is written under another name and renamed once all are complete; it replaces an earlier export. docs/design.md states the
memory that an export takes.
"""

from __future__ import annotations

import contextlib
import itertools
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from pipeline.config.setting import EXPORT_FORMATS
from pipeline.errors import InputError
from pipeline.exports.data_set import DataSet, data_set_of
from pipeline.exports.one_model import of_one_model
from pipeline.results.class_names import class_names_of
from pipeline.results.current import current_rows
from pipeline.results.layout import EXPORTS, check_output
from pipeline.results.lock import locked
from pipeline.results.reader import undisturbed
from pipeline.results.wanted import ALL, Wanted
from pipeline.storage.files import create, delete_files, folders_of, move_files, staging, sync


class Format(NamedTuple):
    """A format: the names of its files, and its writer of JSON rows to these open files, which may return notes."""

    files: tuple[str, ...]
    write: Callable[..., Sequence[str] | None]


_DATA_SETS = ("coco", "yolo", "voc")  # whose images have names below a root
_BY_NUMBER = ("coco", "yolo", "tfrecord")  # which tell classes apart by their numbers
_ONE_ROW = (*_BY_NUMBER, "voc", "cvat")  # which have one place for an image
WAIT_SECONDS = 600.0  # for another export to the same folder

FORMATS = {name: Format(tuple(files), pkgutil.resolve_name(writer)) for name, (writer, *files) in EXPORT_FORMATS.items()}


class Exported(NamedTuple):
    """What an export wrote: the paths of its files, the number of rows in each, and lines for the user."""

    files: Sequence[str]
    rows: int
    notes: Sequence[str]


def export(
    output: str,
    formats: Sequence[str],
    wanted: Wanted = ALL,
    to: str = "",
    *,
    sort: bool = False,
    root: str = "",
    ground_truth: str = "",
    allow_empty: bool = True,
) -> Exported:
    """Writes the rows that count in several formats.

    Args:
      output: The results folder.
      formats: Of `FORMATS`.
      wanted: Which rows.
      to: The folder of the files; empty: `exports/` in the results folder.
      sort: Whether rows are sorted by URI.
      root: The folder from which names of images count in data sets; empty: the deepest that all images have in common.
      ground_truth: COCO annotations with the ids that `coco` uses; empty: its own ids.
      allow_empty: Whether an export may hold no row.

    Raises:
      InputError: The ground truth has no COCO annotations, no image lies in the root, there is no such row, or a format cannot
        hold rows of several models, or two names of a class.
      UnreadableError: Rows cannot be read now, or some are damaged; an earlier export stays as it is.
      OutputError: The folder cannot be written.
    """
    if wanted.every and (one := next((name for name in formats if name in _ONE_ROW), "")):
        raise InputError(
            f"{one} holds one row an image, and with --all an image may have several; leave it out, or write csv or jsonl"
        )
    folder, to = to or output, to or f"{output}/{EXPORTS}"
    check_output(to)
    done, data_set = Exported([], 0, []), None
    with staging(folder) as staged:
        for name in dict.fromkeys(formats):
            more: dict[str, Any] = {"ground_truth": ground_truth} if name == "coco" else {}
            if name in _DATA_SETS:
                data_set = data_set or undisturbed(partial(_data_set, output, wanted, root))
                more["data_set"] = data_set
            read = partial(_rows, output, wanted, name, sort)
            rows, notes = undisturbed(partial(_write, FORMATS[name], read, staged, **more))
            if not (rows or allow_empty):
                raise InputError(f"{output} holds no row of detections{wanted.flags()}")
            done = Exported([*done.files, *FORMATS[name].files], rows, [*done.notes, *notes])
        _put(staged, to, formats)
    return done._replace(files=[f"{to}/{name}" for name in done.files])


def _rows(output: str, wanted: Wanted, name: str, sort: bool) -> Iterator[dict[str, Any]]:
    rows = current_rows(output, wanted, sort=sort)
    return of_one_model(rows, name, by_number=name in _BY_NUMBER) if name in _ONE_ROW else rows


def _put(staged: str, to: str, formats: Sequence[str]) -> None:
    """Gives the files of formats their names; files of one format are never of two exports, however this ends."""
    files = [name for each in dict.fromkeys(formats) for name in FORMATS[each].files]
    with locked(to, "export", wait_s=WAIT_SECONDS, what="export"):
        later = [f"{to}/{name}" for each in formats for name in FORMATS[each].files[1:]]
        delete_files(later)
        sync(folders_of(later))
        move_files({f"{staged}/{name}": f"{to}/{name}" for name in files})


def _data_set(output: str, wanted: Wanted, root: str) -> DataSet:
    rows = current_rows(output, wanted)
    first = next(rows, None)
    data_set, models = data_set_of(rows if first is None else itertools.chain([first], rows), root)
    if first and root and not data_set.has_images:
        raise InputError(f"root {root}: expected a folder of images, found none of them in it; one is {first['image']['uri']}")
    return data_set._replace(class_names=class_names_of(output, models) | data_set.class_names)


def _write(of: Format, read: Callable[[], Iterable[dict[str, Any]]], folder: str, **more: Any) -> tuple[int, Sequence[str]]:
    """Writes the files of a format; returns the number of rows and the notes of its writer."""
    numbers = itertools.count()
    rows = (row for row, _ in zip(read(), numbers, strict=False))
    with contextlib.ExitStack() as stack:
        notes = of.write(rows, *(stack.enter_context(create(f"{folder}/{name}")) for name in of.files), **more)
    return next(numbers), notes or ()
