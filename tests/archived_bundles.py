"""A stream's archive without its stream, as a command: bundles come and are acknowledged, windows become files.

python -m tests.archived_bundles FOLDER ACKNOWLEDGED
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from pipeline.records import ImageRef
from pipeline.stream.archive import Archive, ArchivedRow
from tests.clock import Clock
from tests.rows_of_files import MAKER, Row, dead, found

START = 1795226400.0  # 2026-11-21T02:00:00Z
BUNDLES = [[found("a"), found("b"), dead("x")], [found("c")], [found("d"), dead("y")], [found("e")]]


def archived(row: Row) -> ArchivedRow:
    """A row as a stream hands it to its archive."""
    return ArchivedRow(row.kind, ImageRef(row.row["image"]["uri"]), row.line.rstrip(b"\n"))


def main(argv: Sequence[str]) -> int:
    """Two bundles a window; a folder is made for each that is acknowledged."""
    folder, acknowledged = argv
    clock = Clock(START)
    archive = Archive(folder, "run", window_s=60.0, clock=clock, provenance=MAKER)
    for number, rows in enumerate(BUNDLES):
        archive.spill(map(archived, rows))
        os.mkdir(f"{acknowledged}/{number}")
        clock.now += 30.0
        archive.close_windows()
    archive.finish()
    return 0
