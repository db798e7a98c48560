"""Which of the files in an input this program wrote: they are never input by accident."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator

from pipeline.storage.globs import escape_glob
from pipeline.storage.listing import files_in, listing_backend_of
from pipeline.storage.results import DEAD_LETTERS, DETECTIONS, INDEX, STAGING, is_result_name, kind_of_rows

_FOLDERS_KNOWN = 4096
# Most files are none of these, and one search says so.
_PERHAPS_OURS = re.compile(
    r"/(?:(?:detections|dead_letters|index|coco|samples|runs)/|\.staging-|\.spills-|\.lease|(?:summary\.json|\w+\.html)$)"
)


class OwnFiles:
    """Tells this program's own files from images, in one listing.

    Real paths are compared, so that a link hides nothing. Files in the job's own output folder count by their names. Below an
    input there may be other results folders. They are told by what only this program writes: rows, indexes, or a run at work. The
    files there count unless the input names this very folder (its dead letters are input then) or a part of it (all is input).

    Args:
      output: The job's results folder; empty: none.
      inputs: The folders that are listed.
    """

    def __init__(self, output: str, inputs: Iterable[str]) -> None:
        self._real = functools.lru_cache(_FOLDERS_KNOWN)(_real_folder)
        self._holds_results = functools.lru_cache(_FOLDERS_KNOWN)(_holds_results)
        self._output = self._real(output) if output else None
        self._inputs = sorted({self._real(folder) for folder in inputs}, key=len, reverse=True)

    def has(self, path: str) -> bool:
        """Whether a file that was found is this program's own."""
        real = self._real_path(path)
        if not _PERHAPS_OURS.search(real):
            return False
        listed = next((folder for folder in self._inputs if real.startswith(f"{folder}/")), "")
        return self._is_in_output(real) or any(self._is_of_run(listed, *parts) for parts in _divisions(real))

    def in_output(self, path: str) -> bool:
        """Whether a path, wherever it was named, is that of an own file in the job's output."""
        return self._output is not None and self._is_in_output(self._real_path(path))

    def _is_in_output(self, real: str) -> bool:
        folder = f"{self._output}/"
        return self._output is not None and real.startswith(folder) and is_result_name(real[len(folder) :])

    def _is_of_run(self, listed: str, folder: str, name: str) -> bool:
        """Whether `folder` is a results folder, not above the one that is listed, and `name` is not what is wanted of it."""
        if not (folder == listed or folder.startswith(f"{listed}/")) or not is_result_name(name):
            return False
        kind = kind_of_rows(name)
        if folder == listed and kind == DEAD_LETTERS and name.endswith(".jsonl"):
            return False
        return bool(kind) or self._holds_results(folder)

    def _real_path(self, path: str) -> str:
        folder, _, name = path.rpartition("/")
        return f"{self._real(folder or path[: len(path) - len(name)])}/{name}"


def _divisions(path: str) -> Iterator[tuple[str, str]]:
    """Each folder above a file, with the rest of the path."""
    return ((path[: slash.start()], path[slash.end() :]) for slash in re.finditer("/", path))


def _real_folder(folder: str) -> str:
    return (folder if "://" in folder else os.path.realpath(folder or ".")).rstrip("/")


def _holds_results(folder: str) -> bool:
    """Whether a folder has rows, or indexes of rows, or a run that writes some; looked up once for all its files."""
    escaped = escape_glob(folder)
    for kind in (INDEX, DETECTIONS, DEAD_LETTERS):
        if any(kind_of_rows(file.path) for file in files_in(listing_backend_of(f"{escaped}/{kind}/*"))):
            return True
    return any(True for _ in files_in(listing_backend_of(f"{escaped}/{STAGING}*/run.json")))
