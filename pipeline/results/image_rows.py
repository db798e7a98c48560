"""The rows of an output as `ImageRow`s: of a results folder those that count, of others all that `models.evaluate` reads."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from models.evaluate import detection_rows
from models.evaluate.detection_rows import ImageRow, RowsError, from_json
from models.progress import shown

if TYPE_CHECKING:
    from pipeline.results.newest import Wanted

_SHARD = re.compile(r"\d{8}T\d{6}Z-[\w-]+-[0-9a-f]{32}\.parquet")


def read_rows(source: str) -> list[ImageRow]:
    """Reads all rows of an output.

    Args:
      source: A results folder or its `detections/`, of whose rows with one key the newest counts; or what
        `models.evaluate.detection_rows.read_rows` takes.

    Raises:
      RowsError: The source has no rows, or a row has another form.
    """
    output = _results_folder(source)
    if not output:
        return detection_rows.read_rows(source)
    rows = read_results(output)
    if not rows:
        raise RowsError(f"{source} holds no rows: expected one line for each image")
    return rows


def read_results(output: str, wanted: Wanted | None = None) -> list[ImageRow]:
    """Reads the rows of a results folder, local or `gs://`, of each key the newest.

    Args:
      output: The folder.
      wanted: Only some; see `pipeline.results.newest`.

    Raises:
      RowsError: A row has another form.
    """
    from pipeline.results.newest import ALL, newest_rows  # imports Beam, which files of rows do not need
    from pipeline.results.shards import undisturbed

    def read() -> list[ImageRow]:
        rows = shown(newest_rows(output, wanted or ALL), "reading", "rows")
        return [from_json(row, f"{output}, row {number}") for number, row in enumerate(rows, 1)]

    return undisturbed(read)


def _results_folder(source: str) -> str:
    """The results folder with the shards of a folder, which may be its `detections/`; empty for others."""
    folder = Path(os.path.abspath(source))
    output = folder.parent if folder.name == "detections" else folder
    has_shards = any(_SHARD.fullmatch(path.name) for path in Path(output, "detections").glob("*.parquet"))
    return str(output) if has_shards and folder.is_dir() else ""
