"""Recognises files in an input that this program wrote, so that they are never input by accident."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator

from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, is_result_name, kind_of_rows
from pipeline.storage.globs import escape_glob
from pipeline.storage.listing import files_in, listing_backend_of

_FOLDERS_KNOWN = 4096
# These exclude most files, the first of them all files of a folder.
_OUR_FOLDER = re.compile(r"/(?:(?:detections|dead_letters|exports|samples|runs)/|\.staging-)")
_OUR_NAME = re.compile(r"\.staging-|\.lock-|(?:summary\.json|\w+\.html)$")


class OwnFiles:
    """Separates this program's own files from images, in one listing.

    Compares real paths, so links hide nothing. Files in the job's own output count by their names. Other results folders may
    lie below an input; their rows identify them. Their files count, unless the input names this very folder
    (then its dead letters are input) or a part of it (then everything is input).

    Args:
      output: The job's results folder; empty: none.
      inputs: The folders that are listed.
    """

    def __init__(self, output: str, inputs: Iterable[str]) -> None:
        self._real = functools.lru_cache(_FOLDERS_KNOWN)(_real_folder)
        self._is_ours = functools.lru_cache(_FOLDERS_KNOWN)(lambda folder: _OUR_FOLDER.search(f"{folder}/") is not None)
        self._holds_results = functools.lru_cache(_FOLDERS_KNOWN)(_holds_results)
        self._output = self._real(output) if output else None
        self._inputs = sorted({self._real(folder) for folder in inputs}, key=len, reverse=True)

    def has(self, path: str) -> bool:
        """Whether a listed file is this program's own."""
        folder, _, name = path.rpartition("/")
        if not (_OUR_NAME.match(name) or self._is_ours(self._real(folder or path[: len(path) - len(name)]))):
            return False
        real = self._real_path(path)
        listed = next((folder for folder in self._inputs if real.startswith(f"{folder}/")), "")
        return self._is_in_output(real) or any(self._is_of_run(listed, *parts) for parts in _divisions(real))

    def in_output(self, path: str) -> bool:
        """Whether any path is that of an own file in the job's output."""
        return self._output is not None and self._is_in_output(self._real_path(path))

    def _is_in_output(self, real: str) -> bool:
        folder = f"{self._output}/"
        return self._output is not None and real.startswith(folder) and is_result_name(real[len(folder) :])

    def _is_of_run(self, listed: str, folder: str, name: str) -> bool:
        """Whether `folder` is a results folder, not above the listed one, and `name` is no input in it."""
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
    """Whether a folder has rows; looked up once for all its files."""
    places = [listing_backend_of(f"{escape_glob(folder)}/{kind}/*") for kind in (DETECTIONS, DEAD_LETTERS)]
    return any(kind_of_rows(file.path) for place in places for file in files_in(place))
