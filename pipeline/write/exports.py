"""Exports: the rows of detections that count in a results folder, in other formats, at any time.

A file is written under another name and renamed once all are complete; it replaces an earlier export. docs/design.md states the
memory that an export takes.
"""

from __future__ import annotations

import contextlib
import itertools
import pkgutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from pipeline.config.setting import EXPORT_FORMATS
from pipeline.errors import InputError
from pipeline.results.current import current_rows
from pipeline.results.layout import EXPORTS, check_output
from pipeline.results.reader import undisturbed
from pipeline.results.run import Run
from pipeline.results.wanted import ALL, Wanted
from pipeline.storage.files import create, move_files


class Format(NamedTuple):
    """A format: the names of its files, and its writer of JSON rows to these open files, which may return notes."""

    files: tuple[str, ...]
    write: Callable[..., Sequence[str] | None]


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
      ground_truth: COCO annotations with the ids that `coco` uses; empty: its own ids.
      allow_empty: Whether an export may hold no row.

    Raises:
      InputError: The ground truth has no COCO annotations, or there is no such row.
      UnreadableError: Rows cannot be read now, or some are damaged; an earlier export stays as it is.
      OutputError: The folder cannot be written.
    """
    staging, to = Run(to or output, f"export-{uuid.uuid4().hex[:12]}"), to or f"{output}/{EXPORTS}"
    check_output(to)
    done = Exported([], 0, [])
    with staging.opened():
        for name in dict.fromkeys(formats):
            more = {"ground_truth": ground_truth} if name == "coco" else {}
            read = partial(current_rows, output, wanted, sort=sort)
            rows, notes = undisturbed(partial(_write, FORMATS[name], read, staging.folder, **more))
            if not (rows or allow_empty):
                raise InputError(f"{output} holds no row of detections{wanted.flags()}")
            done = Exported([*done.files, *FORMATS[name].files], rows, [*done.notes, *notes])
        move_files({f"{staging.folder}/{name}": f"{to}/{name}" for name in done.files})
    return done._replace(files=[f"{to}/{name}" for name in done.files])


def _write(of: Format, read: Callable[[], Iterable[dict[str, Any]]], folder: str, **more: str) -> tuple[int, Sequence[str]]:
    """Writes the files of a format; returns the number of rows and the notes of its writer."""
    numbers = itertools.count()
    rows = (row for row, _ in zip(read(), numbers, strict=False))
    with contextlib.ExitStack() as stack:
        notes = of.write(rows, *(stack.enter_context(create(f"{folder}/{name}")) for name in of.files), **more)
    return next(numbers), notes or ()
