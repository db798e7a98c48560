"""Exports: the rows of detections that count in a results folder, in other formats, at any time.

    exports/detections.csv  exports/yolo.zip  exports/voc.zip  exports/cvat.xml  exports/label-studio.json
    exports/detections.tfrecord  exports/coco/results.json  exports/coco/images.json

A file is written under another name and renamed once all are complete; it replaces an earlier export. Memory does not grow with
rows but for 25 bytes a row, which tell the rows that count, and about 1 kB an image for the list of a zip archive's entries.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from pipeline.results.layout import COCO_IMAGES, COCO_RESULTS, EXPORTS, STAGING, check_output
from pipeline.results.newest import ALL, Wanted, newest_rows
from pipeline.results.shards import undisturbed
from pipeline.storage.files import delete_files, list_files, move_files
from pipeline.storage.globs import escape_glob
from pipeline.write.formats import COCO, FORMATS
from pipeline.write.write_coco import read_ground_truth, write_coco


class Exported(NamedTuple):
    """What an export wrote.

    Attributes:
      files: The paths of its files.
      rows: Number of rows in each.
      notes: Lines for the user.
    """

    files: tuple[str, ...]
    rows: int
    notes: tuple[str, ...] = ()


def export(
    output: str, formats: Sequence[str], wanted: Wanted = ALL, to: str = "", *, sort: bool = False, ground_truth: str = ""
) -> Exported:
    """Writes the rows that count in several formats.

    Args:
      output: The results folder.
      formats: Of `FORMATS`, or `coco`.
      wanted: Which rows.
      to: The folder of the files; empty: `exports/` in the results folder.
      sort: Whether rows are sorted by URI.
      ground_truth: COCO annotations with the ids that `coco` uses; empty: its own ids.

    Raises:
      InputError: The ground truth has no COCO annotations.
      OutputError: The folder cannot be written.
    """
    parent, to = to or output, to or f"{output}/{EXPORTS}"
    check_output(to)
    staging = f"{parent}/{STAGING}export-{uuid.uuid4().hex[:12]}"
    done = Exported((), 0)
    try:
        for each in dict.fromkeys(formats):
            one = undisturbed(partial(_write, each, partial(newest_rows, output, wanted, sort=sort), staging, ground_truth))
            done = Exported((*done.files, *one.files), one.rows, (*done.notes, *one.notes))
        move_files({f"{staging}/{name}": f"{to}/{name}" for name in done.files})
    finally:
        delete_files(list_files(f"{escape_glob(staging)}/**"))
        if "://" not in staging:
            shutil.rmtree(staging, ignore_errors=True)
    return done._replace(files=tuple(f"{to}/{name}" for name in done.files))


class _Counted:
    """Rows, which are counted as they pass."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self._rows, self.count = rows, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in self._rows:
            self.count += 1
            yield row


def _write(name: str, rows: Callable[[], Iterable[dict[str, Any]]], staging: str, ground_truth: str) -> Exported:
    counted = _Counted(rows())
    if name != COCO:
        FORMATS[name].write(counted, f"{staging}/{FORMATS[name].file}")
        return Exported((FORMATS[name].file,), counted.count)
    left_out = write_coco(counted, staging, read_ground_truth(ground_truth) if ground_truth else None)
    return Exported((COCO_RESULTS, COCO_IMAGES), counted.count, tuple(left_out.notes(ground_truth)))
