"""What workers in other processes tell the launcher of their figures: a small file each in the run's folder, every few seconds.

Beam's own metrics come too late for that: a job server has those of a bundle when the bundle ends, and in batch a bundle may
have all images; Flink's has none before the job ends. What a process that is killed had told stays told, so what others do
again in its place counts twice; a batch job's summary is made of its rows' own job_stats instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from pipeline.data_format import pack, unpack
from pipeline.stats.canary import CanaryStats, merge_canaries
from pipeline.storage.files import list_files, make_folder, write_file
from pipeline.storage.globs import escape_glob
from pipeline.storage.renewal import keep_renewing
from pipeline.storage.staging import is_introduced
from pipeline.storage.state import read_checked

TELL_SECONDS = 3.0
_FIGURES = "figures"
_Figures = TypeVar("_Figures")
_tellers: list[StatsReporter] = []
_models: list[ModelStats] = []


class ModelStats(Protocol):
    """What is known of the model in use: by a detector of its own, by a launcher of its workers'."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch ladder in use; empty where nobody has said."""

    def canary_stats(self, wait_s: float = 0.0) -> CanaryStats | None:
        """What the canary has shown; waits up to so many seconds for what it has in hand."""


@dataclasses.dataclass(frozen=True)
class _Process(Generic[_Figures]):
    """What a process tells: its figures, and what its model has to say."""

    figures: _Figures
    batch_sizes: tuple[int, ...] = ()
    canary: CanaryStats | None = None


def reporter_of(model: ModelStats) -> None:
    """From now on what this process tells has this model's figures besides."""
    _models[:] = [model]


class StatsReporter:
    """Tells a run's launcher the figures of this process, as long as the run's folder is there.

    Args:
      staging: The run's folder.
      figures: Gives what is to be told; of a type that the launcher expects.
    """

    def __init__(self, staging: str, figures: Callable[[], Any]):
        self._staging = staging
        self._path = f"{staging}/{_FIGURES}/{uuid.uuid4().hex}"
        self._figures = figures
        self._told = b""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Tells now, and from now on every few seconds."""
        self.tell()
        _tellers.append(self)
        keep_renewing("telling figures", TELL_SECONDS, self._tell_again, threading.Event())

    def tell(self) -> None:
        """Tells what has changed; nothing where the run's folder is gone."""
        with self._lock:
            models = [(model.batch_sizes, model.canary_stats()) for model in _models]
            content = pack(_Process(self._figures(), *(models[0] if models else ())))
            if content != self._told and _write(self._path, content):
                self._told = content

    def _tell_again(self) -> bool:
        if not is_introduced(self._staging):
            _tellers.remove(self)
            return False
        self.tell()
        return True


def report_all() -> None:
    """Tells what this process has not told yet, since it ends."""
    for teller in _tellers:
        with contextlib.suppress(Exception):
            teller.tell()


def _write(path: str, content: bytes) -> bool:
    """Writes a file into a folder that is there; where it is gone, it shall not come back."""
    if "://" in path:
        write_file(path, content)
        return True
    unfinished = f"{path}.new"
    try:
        with open(unfinished, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except FileNotFoundError:
        return False
    return True


class WorkerReports:
    """What the workers of a run have told so far, as its launcher sees it.

    Args:
      staging: The run's folder, which is there.
      figures: The type of what each process tells; what is of another type does not count.
    """

    def __init__(self, staging: str, figures: Any = Counter[str]):
        process: Any = _Process
        self._kind = process[figures]
        self._folder = f"{staging}/{_FIGURES}"
        self._looked = float("-inf")
        self._told: list[_Process[Any]] = []
        self._over = False
        make_folder(self._folder)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch ladder of a worker's model; empty where none has told."""
        return max((each.batch_sizes for each in self._processes()), default=())

    def canary_stats(self, wait_s: float = 0.0) -> CanaryStats | None:
        """What the canary has shown to all workers; with `wait_s` once the work is over, as `at_the_end`."""
        if wait_s and any(each.canary for each in self._processes()):
            self.at_the_end()
        return merge_canaries(each.canary for each in self._processes() if each.canary)

    def now(self) -> list[Any]:
        """The figures that each process has told; looked up every few seconds, however often this is asked."""
        return [each.figures for each in self._processes()]

    def at_the_end(self) -> list[Any]:
        """The same once the work is over: waits, the first time, until each process had time to tell the last of it."""
        if not self._over:
            if self._look():
                time.sleep(TELL_SECONDS + 1.0)
            self._told, self._over = self._look(), True
        return self.now()

    def _processes(self) -> list[_Process[Any]]:
        if not self._over and time.monotonic() - self._looked >= TELL_SECONDS:
            with contextlib.suppress(Exception):  # storage may fail for a while
                self._told = self._look()
            self._looked = time.monotonic()
        return self._told

    def _look(self) -> list[_Process[Any]]:
        paths = [path for path in list_files(f"{escape_glob(self._folder)}/*") if not path.endswith(".new")]
        told = (read_checked(path, functools.partial(unpack, self._kind)) for path in paths)
        return [each for each in told if each]
