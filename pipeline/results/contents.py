"""What containers hold: the keys of all images in an archive, video or TFRecord file, so that it need not be opened to know them.

    containers/20261121T020000Z-<run>-<uuid>.contents     what some containers hold, as MessagePack

A job notes what a container of one generation holds when it has read it to its end. The next one compares these keys with those
of the rows that are there, and opens the container only if an image lacks its row. So a note says nothing of what is done: it may
be written before the rows, outlive them, or be lost. A compaction merges them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from pipeline.codec import pack, unpack
from pipeline.results.completion import RowVersion, contains, row_keys
from pipeline.results.layout import CONTENTS, is_result_name, time_in_name
from pipeline.storage.files import delete_files, read_checked, write_file
from pipeline.storage.listing import files_of
from pipeline.storage.store import FoundFile

_KEY_BYTES = 8
_MERGED_BYTES = 16 << 20  # of a merged file of notes
_FORMAT = "1"  # changes when a release finds other images in the same container


class Contents(msgspec.Struct, frozen=True, gc=False):
    """What one generation of a container holds.

    Attributes:
      key: See `container_key`.
      uri: The container, for people.
      images: The keys of its images, `(N,) uint64`, little-endian.
      left_out: How many members are no images, by kind.
    """

    key: int
    uri: str
    images: bytes
    left_out: dict[str, int] = {}

    def __post_init__(self) -> None:
        if len(self.images) % _KEY_BYTES:
            raise ValueError(f"expected keys of {_KEY_BYTES} bytes, got {len(self.images)} bytes")

    @property
    def keys(self) -> np.ndarray:
        """The keys of its images, `(N,) uint64`."""
        return np.frombuffer(self.images, "<u8")


class Known(msgspec.Struct, frozen=True, gc=False):
    """A container of which all images have rows: how many of each outcome, and how many members are no images, by kind."""

    outcomes: dict[int, int]
    left_out: dict[str, int]


def container_key(uri: str, generation: str, version: RowVersion, reading: str = "") -> int:
    """The key of a container: a row of it would have this one.

    Args:
      uri: The container.
      generation: Its generation.
      version: Of the rows of its images.
      reading: The settings that decide which images it has.
    """
    settings = f"{version.settings}/contents-{_FORMAT}/{reading}"
    return int(row_keys([(uri, generation, version.model, version.version, settings)])[0])


def write_contents(output: str, run: str, contents: Sequence[Contents]) -> None:
    """Notes what containers hold."""
    name = f"{CONTENTS}/{time_in_name(time.time())}-{run or 'contents'}-{uuid.uuid4().hex}.contents"
    write_file(f"{output}/{name}", pack(list(contents)))


def merge_contents(output: str) -> None:
    """Merges small files of notes into larger ones, with one note of each container's generation; those that were read go."""
    read: list[str] = []
    notes: dict[int, Contents] = {}
    size_bytes = 0

    def flush() -> None:
        if len(read) > 1:
            write_contents(output, "compact", list(notes.values()))
            delete_files(read)
        read.clear()
        notes.clear()

    for file in list(_files(output)):
        if 2 * file.size_bytes >= _MERGED_BYTES or (contents := _read(file)) is None:
            continue
        if size_bytes + file.size_bytes > _MERGED_BYTES:
            flush()
            size_bytes = 0
        read.append(file.path)
        notes |= {each.key: each for each in contents}
        size_bytes += file.size_bytes
    flush()


def known_containers(output: str, done: dict[int, np.ndarray]) -> dict[int, Known]:
    """The containers of which all images have rows that count as done, by their keys.

    Args:
      output: The results folder.
      done: The keys of such rows, sorted, by outcome.
    """
    return {each.key: known for each in _contents(output) if (known := _known(each, done))}


def _known(contents: Contents, done: dict[int, np.ndarray]) -> Known | None:
    left, outcomes = contents.keys, dict[int, int]()
    for outcome, keys in sorted(done.items()):
        found = contains(keys, left)
        outcomes[outcome], left = int(found.sum()), left[~found]
    return None if len(left) else Known(outcomes, contents.left_out)


def _contents(output: str) -> Iterable[Contents]:
    for file in _files(output):
        yield from _read(file) or ()


def _files(output: str) -> Iterator[FoundFile]:
    return (file for file in files_of(f"{output}/{CONTENTS}") if is_result_name(file.path.removeprefix(f"{output}/")))


def _read(file: FoundFile) -> list[Contents] | None:
    """The notes of a file; None where it is gone or damaged."""
    contents: list[Contents] | None = read_checked(file.path, lambda content: unpack(list[Contents], content))
    return contents
