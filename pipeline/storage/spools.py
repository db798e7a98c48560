"""More lines than memory holds, in order: written as sorted spools of a bounded size, merged while they are read.

An external merge sort (Knuth, The Art of Computer Programming 3, 5.4): the memory is that of one spool while lines are written,
and of `_MERGED_AT_ONCE` buffers while they are read, however many lines there are.
"""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from pipeline.storage.files import create, delete_files, read_lines

SPOOL_BYTES = 32_000_000
_MERGED_AT_ONCE = 32  # a reader of an object holds 16 MB


class Spool(NamedTuple):
    """A file of sorted lines in staging."""

    path: str
    lines: int


class Spooler:
    """Gathers lines under keys, and writes those of each key as a sorted spool whenever there are enough of all together.

    Args:
      folder: Where spools go; each has a name of its own.
      most_bytes: How many bytes of lines are held in memory; default: `SPOOL_BYTES`.
    """

    def __init__(self, folder: str, most_bytes: int = 0):
        self._folder = folder
        self._most_bytes = most_bytes or SPOOL_BYTES
        self._bytes = 0
        self._open: dict[Any, tuple[str, Any, list[bytes]]] = {}

    def add(self, key: Any, line: bytes) -> Iterator[tuple[Any, Spool]]:
        """Takes a line, with its end; gives the spools that are complete now."""
        if key not in self._open:
            path = f"{self._folder}/{uuid.uuid4().hex}"
            self._open[key] = (path, create(path), [])  # now: a disk that takes no file says so before the work is done
        self._open[key][2].append(line)
        self._bytes += len(line)
        if self._bytes >= self._most_bytes:
            yield from self.flush()

    def flush(self) -> Iterator[tuple[Any, Spool]]:
        """Writes and gives what there is."""
        for key, (path, file, lines) in self._open.items():
            lines.sort()
            with file:
                file.writelines(lines)
            yield key, Spool(path, len(lines))
        self._open, self._bytes = {}, 0


def merge_lines(paths: Iterable[str], folder: str, read: Callable[[str], Iterator[bytes]] = read_lines) -> Iterator[bytes]:
    """The lines of all files of sorted lines, sorted; equal ones stay.

    Args:
      paths: What to merge; the files stay.
      folder: Where files of merged lines go, if there are too many to be read at once.
      read: The lines of a file as they shall be merged, with their ends.
    """
    paths, made = sorted(paths), set[str]()

    def lines_of(path: str) -> Iterator[bytes]:
        return read_lines(path) if path in made else read(path)

    while len(paths) > _MERGED_AT_ONCE:
        merged = f"{folder}/{uuid.uuid4().hex}"
        some = min(_MERGED_AT_ONCE, len(paths) - _MERGED_AT_ONCE + 1)  # as few as need be
        first, paths = paths[:some], paths[some:]
        with create(merged) as file:
            file.writelines(heapq.merge(*map(lines_of, first)))
        delete_files(path for path in first if path in made)
        made.add(merged)
        paths.append(merged)
    yield from heapq.merge(*map(lines_of, paths))
    delete_files(path for path in paths if path in made)
