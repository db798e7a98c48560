"""A stream's archive without its stream, also as a command: bundles come, windows become shards, messages are acknowledged.

python -m tests.archived_stream FOLDER ACKNOWLEDGED
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from msgspec.structs import replace

from pipeline.records import DeadLetter, DetectedImage, ImageRef
from pipeline.results.run_folder import Run
from pipeline.stream.archive import Archive, RowWriter
from pipeline.stream.threads import RunThreads
from tests.clock import Clock
from tests.shard_rows import VERSION, detected, failed

BUNDLES = ["ab", "c", "dx", "e"]


def archived(name: str, message: str = "") -> DetectedImage | DeadLetter:
    """The record of an image; one whose name begins with `x` has failed."""
    record = failed(name) if name.startswith("x") else detected(name)
    return replace(record, ref=ImageRef(name, "1", message_id=message or name))


class ArchivedStream:
    """An archive with windows of ten seconds, its clock, and the holds of its messages.

    Args:
      folder: The results folder.
      end_hold: What ends the holds of messages.
      run: Names its run.
    """

    def __init__(self, folder: str, end_hold: Callable[[Sequence[str]], object], run: str = "0a1b"):
        self.clock, self.threads, self.held = Clock(), RunThreads(), Counter[str]()
        self.folder = folder
        subscriber = SimpleNamespace(hold=self.held.update, end_hold=end_hold)
        self.archive = Archive(RowWriter(Run(folder, run), VERSION), 10.0, self.threads, subscriber, clock=self.clock)

    def add(self, *names: str, message: str = "") -> None:
        """Adds the records of a bundle, each of a message of its own or all of one."""
        self.archive.add([archived(name, message) for name in names])


def main(argv: Sequence[str]) -> int:
    """Two bundles a window; a folder is made for each message that is acknowledged."""
    folder, acknowledged = argv

    def acknowledge(messages: Sequence[str]) -> None:
        for message in messages:
            os.mkdir(f"{acknowledged}/{message}")

    stream = ArchivedStream(folder, acknowledge)
    for names in BUNDLES:
        stream.add(*names)
        stream.clock.now += 5.0
        stream.archive.write_if_over()
    stream.archive.finish()
    return 0
