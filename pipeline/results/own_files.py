"""Recognises files in an input that this program wrote, so that they are never input by accident."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable

from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, is_result_name, kind_of_rows
from pipeline.storage.listing import files_of

_FOLDERS_KNOWN = 4096
# These exclude most files, the first of them all files of a folder.
_OUR_FOLDER = re.compile(r"/(?:(?:detections|dead_letters|exports|samples|runs)/|\.staging-)")
_OUR_NAME = re.compile(r"\.staging-|\.lock-|(?:summary\.json|\w+\.html)$")


class OwnFiles:
    """Separates this program's own files from images, in one listing.

    Compares real paths, so links hide nothing. Files in the job's own output count by their names. Other results folders may
    lie below an input; their rows identify them. Their files count, unless the input names a part of such a folder.

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
        real_folder = self._real(folder or path[: len(path) - len(name)])
        if not (_OUR_NAME.match(name) or self._is_ours(real_folder)):
            return False
        real = f"{real_folder}/{name}"
        listed = next((folder for folder in self._inputs if real.startswith(f"{folder}/")), "")
        return any(self._is_result(listed, real[: slash.start()], real[slash.end() :]) for slash in re.finditer("/", real))

    def _is_result(self, listed: str, folder: str, name: str) -> bool:
        """Whether `folder` is the output, or another results folder that is not above the listed one, and `name` a file in it."""
        if not is_result_name(name):
            return False
        return folder == self._output or (f"{folder}/".startswith(f"{listed}/") and self._holds_results(folder))


def _real_folder(folder: str) -> str:
    return (folder if "://" in folder else os.path.realpath(folder or ".")).rstrip("/")


def _holds_results(folder: str) -> bool:
    """Whether a folder has rows; looked up once for all its files."""
    return any(kind_of_rows(file.path) for kind in (DETECTIONS, DEAD_LETTERS) for file in files_of(f"{folder}/{kind}"))
