"""A run: one execution of a job, with its name, its folder of unfinished files, and its reports.

.staging-<run>/     unfinished files, which no reader looks at; it goes when the run ends
runs/<run>/         summary.json, report.html, samples/: a run that has a summary is complete
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.results.layout import RUNS
from pipeline.storage.files import UNFINISHED, delete_files, exists, is_own_file, write_file
from pipeline.storage.globs import escape_glob
from pipeline.storage.listing import files_of

_OPEN = "open"  # the file that launcher and workers know the run's folder by
ABANDONED_SECONDS = 86_400.0


class Run(NamedTuple):
    """One execution of a job, as the results folder knows it.

    Attributes:
      output: The results folder, local or on object storage.
      name: The run's name.
      began: When it began, in seconds since the epoch; in the names of its shards.
    """

    output: str
    name: str
    began: float = 0.0

    @staticmethod
    def new(output: str) -> Run:
        """A run with a name of its own, of which nothing is written yet."""
        return Run(output, uuid.uuid4().hex[:12], time.time())

    @property
    def folder(self) -> str:
        """The folder of the run's unfinished files."""
        return f"{self.output}/{UNFINISHED}{self.name}"

    @property
    def reports(self) -> str:
        """The folder of the run's reports."""
        return f"{self.output}/{RUNS}/{self.name}"

    def is_open(self) -> bool:
        """Whether the run has not ended, as its workers see it."""
        return exists(f"{self.folder}/{_OPEN}")

    @contextlib.contextmanager
    def opened(self, *, outlives: bool = False) -> Iterator[None]:
        """Makes the run's folder, and removes it at the end.

        Args:
          outlives: Whether the job may go on where its launcher fails: its workers need the folder, which goes a day later.
        """
        write_file(f"{self.folder}/{_OPEN}", b"")
        try:
            yield
        except BaseException:
            if not outlives:
                self._remove_if_possible()
            raise
        self._remove_if_possible()

    def _remove_if_possible(self) -> None:
        with contextlib.suppress(Exception):  # the folder is removed once it is abandoned
            self.remove()

    def remove(self) -> None:
        """Removes the run's folder."""
        if "://" not in self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        delete_files(file.path for file in files_of(self.folder, "**"))


def remove_abandoned(output: str) -> None:
    """Removes unfinished files, and folders of them in which nothing has changed for a day: their runs were killed.

    A run that wakes up later does not find the shard that it was writing; its bundle fails, and nothing is lost.
    """
    from apache_beam.io.filesystems import FileSystems

    written: dict[str, float] = {}
    pattern = f"{escape_glob(output)}/{UNFINISHED}*"
    for match in FileSystems.match([f"{pattern}/**", *([] if "://" in output else [f"{pattern}/*"])]):
        for entry in match.metadata_list:
            name = entry.path[len(output) + 1 :].partition("/")[0].removeprefix(UNFINISHED)
            written[name] = max(written.get(name, 0.0), entry.last_updated_in_seconds)
    for path in glob.iglob(f"{glob.escape(output)}/*/{UNFINISHED}*"):  # shards without their names; objects have theirs at once
        with contextlib.suppress(FileNotFoundError):
            is_ours = is_own_file(path) and not os.path.islink(os.path.dirname(path))
            if is_ours and time.time() - os.path.getmtime(path) > ABANDONED_SECONDS:
                os.remove(path)
    for name, last in written.items():
        if time.time() - last > ABANDONED_SECONDS and not os.path.islink(Run(output, name).folder):
            Run(output, name).remove()
