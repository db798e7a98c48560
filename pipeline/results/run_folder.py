"""A run: one execution of a job, with its name, its folder of unfinished files, and its reports.

.staging-<run>/     unfinished files, which no reader looks at, and what its workers report; it goes when the run ends
runs/<run>/         summary.json, report.html, samples/, and outcome.json: a run that has an outcome has ended

A job that outlives its launcher is alive as long as its workers report: each does so every 20 seconds, also if nothing changes.
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

from pipeline.process import PROCESS
from pipeline.results.layout import OUTCOME, RUNS
from pipeline.storage.files import UNFINISHED, delete_files, exists, is_own_file, write_files
from pipeline.storage.listing import files_of
from pipeline.storage.store import retried
from pipeline.storage.stores import store_of

_OPEN = "open"  # the file that launcher and workers know the run's folder by
_SUBMITTED = "submitted"  # the file of a job that goes on without its launcher
FIGURES = "figures"  # the folder of workers' reports, each of which is a heartbeat
BEAT_SECONDS = 20.0  # between two of a worker's heartbeats
_LOST_SECONDS = 120.0  # without a heartbeat, a run has ended
_STARTS_SECONDS = 1800.0  # so long may a job wait for machines, which load images and models, before the first heartbeat
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

    def has_outcome(self) -> bool:
        """Whether the run has ended, and how is known."""
        return exists(f"{self.reports}/{OUTCOME}")

    def open(self, *, outlives: bool = False) -> None:
        """Makes the run's folder.

        Args:
          outlives: Whether the job goes on without its launcher, so that its heartbeats count.
        """
        write_files({f"{self.folder}/{name}": b"" for name in (_OPEN, *([_SUBMITTED] if outlives else []))})

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Makes the run's folder, and removes it at the end."""
        self.open()
        try:
            yield
        finally:
            self.remove_if_possible()

    def goes_on(self) -> bool:
        """Whether the run, whose launcher may have gone, is alive by the heartbeats of its workers, or may still start."""
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            started_s = _age(f"{self.folder}/{_SUBMITTED}")
            beats = [file.path for file in files_of(f"{self.folder}/{FIGURES}")]
            is_alive = any(_age(beat) < _LOST_SECONDS for beat in beats) if beats else started_s < _STARTS_SECONDS
            return is_alive and not self.has_outcome()
        return False

    def remove_if_possible(self) -> None:
        """Removes the run's folder, which else goes once it is abandoned."""
        PROCESS.clean_up(self._try_to_remove)

    def _try_to_remove(self) -> None:
        with contextlib.suppress(Exception):
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
        return _age(path) > ABANDONED_SECONDS
    return True


def _age(path: str) -> float:
    """How many seconds ago a file was written, by the clock of its store.

    Raises:
      FileNotFoundError: It is gone.
    """
    return float(retried(store_of(path).age)(path)[0] if "://" in path else time.time() - os.lstat(path).st_mtime)
