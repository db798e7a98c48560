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
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.results.layout import RUNS
from pipeline.storage.files import UNFINISHED, delete_files, exists, is_own_file, write_file
from pipeline.storage.listing import files_of
from pipeline.storage.store import retried
from pipeline.storage.stores import store_of

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
    if "://" in output:
        paths: defaultdict[str, list[str]] = defaultdict(list)
        for file in files_of(output, f"{UNFINISHED}**"):
            paths[file.path[len(output) + 1 :].partition("/")[0]].append(file.path)
        delete_files(path for found in paths.values() if all(map(_is_abandoned, found)) for path in found)
        return
    pattern = glob.escape(output)
    for path in glob.iglob(f"{pattern}/{UNFINISHED}*"):
        if os.path.isdir(path) and not os.path.islink(path) and all(map(_is_abandoned, _below(path))):
            shutil.rmtree(path, ignore_errors=True)
    for path in (*glob.iglob(f"{pattern}/{UNFINISHED}*"), *glob.iglob(f"{pattern}/*/{UNFINISHED}*")):
        is_ours = is_own_file(path) and (os.path.dirname(path) == output or not os.path.islink(os.path.dirname(path)))
        if is_ours and _is_abandoned(path):  # what was being written; objects are there at once
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)


def _below(folder: str) -> list[str]:
    """The files below a local folder; of an empty one itself."""
    return [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names] or [folder]


def _is_abandoned(path: str) -> bool:
    """Whether a file or a local folder has not changed for a day, or is gone."""
    with contextlib.suppress(FileNotFoundError):
        age_s = retried(store_of(path).age)(path)[0] if "://" in path else time.time() - os.lstat(path).st_mtime
        return age_s > ABANDONED_SECONDS
    return True
