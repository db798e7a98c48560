"""A stream's archive without its stream, as a command: bundles come, windows become shards, messages are acknowledged.

python -m tests.archived_stream FOLDER ACKNOWLEDGED
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from types import SimpleNamespace

from pipeline.records import DeadLetter, DetectedImage, ImageRef
from pipeline.stream.archive import Archive, RowWriter
from pipeline.stream.threads import RunThreads
from tests.clock import Clock
from tests.shard_rows import VERSION, detected, failed

BUNDLES = ["ab", "c", "dx", "e"]


def archived(name: str, message: str = "") -> DetectedImage | DeadLetter:
    """The record of an image; one whose name begins with `x` has failed."""
    record = failed(name) if name.startswith("x") else detected(name)
    return dataclasses.replace(record, ref=ImageRef(name, "1", message_id=message or name))


def main(argv: Sequence[str]) -> int:
    """Two bundles a window; a folder is made for each message that is acknowledged."""
    folder, acknowledged = argv
    clock = Clock()

    def acknowledge(messages: Sequence[str]) -> None:
        for message in messages:
            os.mkdir(f"{acknowledged}/{message}")

    archive = Archive(
        RowWriter(folder, "0a1b", VERSION), 10.0, RunThreads(), SimpleNamespace(hold=len, end_hold=acknowledge), clock
    )
    for names in BUNDLES:
        archive.add([archived(name) for name in names])
        clock.now += 5.0
        archive.write_if_over()
    archive.finish()
    return 0
