"""What workers in other processes tell the launcher of their figures: a small file each in the run's folder, every few seconds.

Beam's own metrics come too late for that: a job server has those of a bundle when the bundle ends, and in batch a bundle may
have all images; Flink's has none before the job ends. What a process that is killed had told stays told, so what others do
again in its place counts twice; a batch job's summary is made of its rows' own tallies instead.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from pipeline.storage.files import list_files, make_folder, read_file, write_file
from pipeline.storage.globs import escape_glob
from pipeline.storage.renewed import keep_renewing
from pipeline.storage.staging import is_introduced

TELL_SECONDS = 3.0
_FIGURES = "figures"
_tellers: list[Teller] = []


class Teller:
    """Tells a run's launcher the figures of this process, as long as the run's folder is there.

    Args:
      staging: The run's folder.
      figures: Gives what is to be told; whatever can be pickled.
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
            content = pickle.dumps(self._figures())
            if content != self._told and _write(self._path, content):
                self._told = content

    def _tell_again(self) -> bool:
        if not is_introduced(self._staging):
            _tellers.remove(self)
            return False
        self.tell()
        return True


def tell_all() -> None:
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


class Told:
    """What the workers of a run have told so far, as its launcher sees it.

    Args:
      staging: The run's folder, which is there.
    """

    def __init__(self, staging: str):
        self._folder = f"{staging}/{_FIGURES}"
        self._looked = float("-inf")
        self._told: list[Any] = []
        make_folder(self._folder)

    def now(self) -> list[Any]:
        """What each process has told; looked up every few seconds, however often this is asked."""
        if time.monotonic() - self._looked >= TELL_SECONDS:
            with contextlib.suppress(Exception):  # storage may fail for a while
                self._told = self._look()
            self._looked = time.monotonic()
        return self._told

    def at_the_end(self) -> list[Any]:
        """The same once the work is over: waits until each process had time to tell the last of it."""
        if self._look():
            time.sleep(TELL_SECONDS + 1.0)
        return self._look()

    def _look(self) -> list[Any]:
        paths = [path for path in list_files(f"{escape_glob(self._folder)}/*") if not path.endswith(".new")]
        return [pickle.loads(read_file(path)) for path in paths]  # noqa: S301  written by this very job
