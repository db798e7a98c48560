"""More lines than memory holds, in order: written as sorted spills of a bounded size, merged while they are read.

An external merge sort (Knuth, The Art of Computer Programming 3, 5.4): the memory is that of one spill while lines are written,
and of `_MERGED_AT_ONCE` buffers while they are read, however many lines there are.
"""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pipeline.storage.files import create, delete_files, open_part, read_lines

SPOOL_BYTES = 32_000_000
_MERGED_AT_ONCE = 32


class SpillFile(NamedTuple):
    """Sorted lines in staging: a part of a file.

    Attributes:
      path: The file.
      lines: How many lines.
      start: At which byte of the file they begin.
      size_bytes: How many bytes they have.
    """

    path: str
    lines: int
    start: int
    size_bytes: int

    def read(self) -> Iterator[bytes]:
        """The lines, with their ends."""
        with open_part(self.path, self.start, self.size_bytes) as lines:
            yield from lines


KeyedSpills = Sequence[tuple[Any, SpillFile]]


class SpillWriter:
    """Gathers lines under keys, and writes them to a file, as one sorted spill a key, whenever there are enough of all together.

    Args:
      folder: Where files go; each has a name of its own.
      most_bytes: How many bytes of lines are held in memory; default: `SPOOL_BYTES`.
      ending: What the names of files end with.
      footer: What follows the spills of a file.
    """

    def __init__(
        self, folder: str, most_bytes: int = 0, ending: str = "", footer: Callable[[KeyedSpills], bytes] = lambda _spills: b""
    ):
        self._folder = folder
        self._most_bytes = most_bytes or SPOOL_BYTES
        self._ending = ending
        self._footer = footer
        self._path = ""
        self._lines: dict[Any, list[bytes]] = {}
        self._bytes = 0

    def add(self, key: Any, line: bytes) -> Iterator[tuple[Any, SpillFile]]:
        """Takes a line, with its end; gives the spills that are complete now."""
        if not self._path:
            self._path = f"{self._folder}/{uuid.uuid4().hex}{self._ending}"
            self._file = create(self._path)  # now: a disk that takes no file says so before the work is done
        self._lines.setdefault(key, []).append(line)
        self._bytes += len(line)
        if self._bytes >= self._most_bytes:
            yield from self.flush()

    def flush(self) -> Iterator[tuple[Any, SpillFile]]:
        """Writes and gives what there is."""
        if not self._path:
            return
        spills: list[tuple[Any, SpillFile]] = []
        start = 0
        with self._file as file:
            for key, lines in self._lines.items():
                file.writelines(sorted(lines))
                spills.append((key, SpillFile(self._path, len(lines), start, sum(map(len, lines)))))
                start += spills[-1][1].size_bytes
            file.write(self._footer(spills))
        self._path, self._lines, self._bytes = "", {}, 0
        yield from spills


def merge_spills(spills: Iterable[SpillFile], folder: str) -> Iterator[bytes]:
    """The lines of all spills, sorted; `folder` is for files of merged lines, if there are too many to be read at once."""
    by_name = {f"{spill.path}:{spill.start}": spill for spill in spills}
    return merge_lines(by_name, folder, lambda name: by_name[name].read())


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
