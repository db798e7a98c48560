"""External merge sort (Knuth, The Art of Computer Programming 3, 5.4): sorted spill files of bounded size, merged on reading.

The writer needs the memory of one spill file, the reader that of `_MERGED_AT_ONCE` buffers, however many lines there are.
"""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pipeline.storage.files import create, delete_files, open_part, read_lines

SPILL_BYTES = 32_000_000
_MERGED_AT_ONCE = 32


class SpillFile(NamedTuple):
    """Sorted lines: a part of a spill file.

    Attributes:
      path: The file.
      lines: How many lines.
      start: Their first byte in the file.
      size_bytes: Their size.
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
    """Collects lines by key; whenever they reach a size together, writes them to a file, sorted, one part for each key.

    Args:
      folder: The folder of the files.
      most_bytes: How many bytes of lines are held in memory; default: `SPILL_BYTES`.
      ending: What the names of files end with.
      footer: Makes the end of a file.
    """

    def __init__(
        self, folder: str, most_bytes: int = 0, ending: str = "", footer: Callable[[KeyedSpills], bytes] = lambda _spills: b""
    ):
        self._folder = folder
        self._most_bytes = most_bytes or SPILL_BYTES
        self._ending = ending
        self._footer = footer
        self._path = ""
        self._lines: dict[Any, list[bytes]] = {}
        self._bytes = 0

    def add(self, key: Any, line: bytes) -> Iterator[tuple[Any, SpillFile]]:
        """Adds a line, with its end; yields the parts that are complete now."""
        if not self._path:
            self._path = f"{self._folder}/{uuid.uuid4().hex}{self._ending}"
            self._file = create(self._path)  # now, so that a disk that takes no file fails before the work is done
        self._lines.setdefault(key, []).append(line)
        self._bytes += len(line)
        if self._bytes >= self._most_bytes:
            yield from self.flush()

    def flush(self) -> Iterator[tuple[Any, SpillFile]]:
        """Writes and yields all that is left."""
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
    """The lines of all parts, sorted; `folder` is for intermediate files, if there are too many parts to be read at once."""
    by_name = {f"{spill.path}:{spill.start}": spill for spill in spills}
    return merge_lines(by_name, folder, lambda name: by_name[name].read())


def merge_lines(paths: Iterable[str], folder: str, read: Callable[[str], Iterator[bytes]] = read_lines) -> Iterator[bytes]:
    """The lines of sorted files, sorted; equal lines stay.

    Args:
      paths: The files.
      folder: For intermediate files, if there are too many files to be read at once.
      read: Reads the lines of a file, with their ends.
    """
    paths, made = sorted(paths), set[str]()

    def lines_of(path: str) -> Iterator[bytes]:
        return read_lines(path) if path in made else read(path)

    while len(paths) > _MERGED_AT_ONCE:
        merged = f"{folder}/{uuid.uuid4().hex}"
        some = min(_MERGED_AT_ONCE, len(paths) - _MERGED_AT_ONCE + 1)  # as few as possible
        first, paths = paths[:some], paths[some:]
        with create(merged) as file:
            file.writelines(heapq.merge(*map(lines_of, first)))
        delete_files(path for path in first if path in made)
        made.add(merged)
        paths.append(merged)
    yield from heapq.merge(*map(lines_of, paths))
    delete_files(path for path in paths if path in made)
