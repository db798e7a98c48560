"""Anti-join of the input listing with the ledger, hash-partitioned by the images' names so that each partition fits in memory.

Of the ledger only the keys of rows travel (see `ledger.key_of`), as one block for each partition. They come from the indexes, a
column at a time. If an input names an image without its generation, storage is asked for it only if the image has a row.

The rows that a killed run of the same command has spilled are joined in the same way, by name alone: each such image was read
once, whatever became of it since.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np

from pipeline.limits import available_cpus
from pipeline.records import ImageRef, identity_hash, name_of
from pipeline.results.completion import UNKNOWN, CompletionRule
from pipeline.results.layout import DETECTIONS
from pipeline.results.ledger import RowsFile, entry_of, key_of, list_files_of_rows, read_keys
from pipeline.storage.listing import MAX_PARALLEL
from pipeline.storage.listing_backends import generation_of
from pipeline.storage.spill_files import SpillFile
from pipeline.storage.web import is_web, look_up

PARTITIONS = 4096  # each in memory at once: 25,000 names of 100 million
_KEY = struct.Struct("=QQ")
_HALF = _KEY.size // 2  # the hash of the name
_ROWS_AT_ONCE = 16_384
_HELD = 1 << 20  # keys: 16 MB


def partition_of(uri: str) -> int:
    """The partition of an image."""
    return identity_hash(uri) % PARTITIONS


def packed_key(ref: ImageRef) -> bytes:
    """The key of an image; empty if its generation is not known."""
    return _KEY.pack(*key_of(ref.uri, ref.generation)) if ref.generation else b""


class KeyBlocks:
    """Collects keys, and divides them by partition.

    Args:
      held: How many keys are held until they are divided.
    """

    def __init__(self, held: int = _HELD) -> None:
        self._held = held
        self._keys: list[np.ndarray] = []

    def add(self, parts: Iterable[np.ndarray]) -> Iterator[tuple[int, bytes]]:
        """Adds keys `(N, 2) uint64`; yields (partition, keys) whenever enough are collected."""
        for keys in parts:
            self._keys.append(keys)
            if sum(map(len, self._keys)) >= self._held:
                yield from self.flush()

    def flush(self) -> Iterator[tuple[int, bytes]]:
        """Yields (partition, keys) of all that is left."""
        if not self._keys:
            return
        keys, self._keys = np.concatenate(self._keys), []
        partitions = (keys[:, 0] % PARTITIONS).astype(np.intp)
        keys = keys[np.argsort(partitions, kind="stable")]
        numbers, starts = np.unique(np.sort(partitions), return_index=True)
        for number, block in zip(numbers.tolist(), np.split(keys, starts[1:]), strict=False):
            yield number, block.tobytes()


class CompletedNames:
    """The images of one partition that are done.

    Args:
      blocks: The keys of the partition's rows that count as done.
      pool: For the requests for generations.
    """

    def __init__(self, blocks: Iterable[bytes], pool: ThreadPoolExecutor):
        self._keys = set(_split(blocks))
        self._pool = pool

    def among(self, named: Mapping[bytes, bytes], location_of: Callable[[bytes], bytes] = lambda name: name) -> set[bytes]:
        """Those of some images that are done.

        Args:
          named: Each name with its key, which is empty where its generation is not known.
          location_of: Gives where the image of a name is read.
        """
        if not self._keys:
            return set()
        done = {name for name, key in named.items() if key in self._keys}
        have_rows = {key[:_HALF] for key in self._keys}
        asked = [name for name, key in named.items() if not key and _packed_name(name) in have_rows]
        found = self._pool.map(_asked_key, map(location_of, asked))
        return done | {name for name, key in zip(asked, found, strict=True) if key in self._keys}


class ResumedNames:
    """The images of one partition that have a row of a killed run of this command, whatever their version is by now.

    Args:
      blocks: The keys of these rows.
    """

    def __init__(self, blocks: Iterable[bytes]):
        self._names = {key[:_HALF] for key in _split(blocks)}

    def among(self, names: Iterable[bytes]) -> dict[bytes, bytes]:
        """Those of some images that have a row, each with its packed name."""
        return {name: packed for name in names if (packed := _packed_name(name)) in self._names} if self._names else {}

    def but(self, packed: Iterable[bytes]) -> int:
        """How many other images have a row."""
        return len(self._names.difference(packed))


class CompletedKeys(Container[ImageRef]):
    """A set of keys, 16 bytes each: for images whose identity is known only once they are read, and for a dry run.

    Args:
      parts: The keys, each part `(N, 2) uint64`.
    """

    def __init__(self, parts: Iterable[np.ndarray]):
        keys = _all_keys(parts)
        self._keys = keys[np.argsort(keys[:, 1])]

    @staticmethod
    def of(output: str, done: CompletionRule) -> CompletedKeys:
        """The keys of the rows in a results folder that count as done."""
        return CompletedKeys(keys_completed(list_files_of_rows(output), done))

    def __contains__(self, ref: object) -> bool:
        if not isinstance(ref, ImageRef):
            return False
        of_name, of_identity = key_of(ref.uri, ref.generation)
        place = int(np.searchsorted(self._keys[:, 1], np.uint64(of_identity)))
        return place < len(self._keys) and tuple(self._keys[place].tolist()) == (of_name, of_identity)


def keys_completed(files: Sequence[RowsFile], done: CompletionRule) -> Iterator[np.ndarray]:
    """The keys of the rows in some files that count as done; reads a few files in parallel."""
    with ThreadPoolExecutor(min(MAX_PARALLEL, available_cpus()) * 2, "read-ledger") as pool:
        for parts in pool.map(lambda file: list(read_keys(file, done)), files):
            yield from parts


def keys_resumed(spills: Iterable[SpillFile]) -> Iterator[np.ndarray]:
    """The keys of the rows in spill files."""
    for spill in spills:
        entries = filter(None, (entry_of(line, DETECTIONS, UNKNOWN) for line in spill.read()))
        while some := [key_of(entry.uri, entry.generation) for entry in islice(entries, _ROWS_AT_ONCE)]:
            yield np.array(some, np.uint64)


def done_since(spills: Iterable[SpillFile], files: Sequence[RowsFile], done: CompletionRule) -> set[tuple[int, int]]:
    """The keys of image generations that have a row both in a killed run's spill files and in files of rows.

    Other runs wrote these files since the kill; with the killed run's rows the images would be there twice.

    Args:
      spills: The killed run's spill files.
      files: The files of rows.
      done: Which of their rows count as done.
    """
    resumed = np.unique(_all_keys(keys_resumed(spills))[:, 1])
    of_others = [part[np.isin(part[:, 1], resumed)] for part in keys_completed(files, done)] if len(resumed) else []
    return set(map(tuple, _all_keys(of_others).tolist()))


def has_any(spills: Iterable[SpillFile], keys: Set[tuple[int, int]]) -> bool:
    """Whether a row in spill files has one of some keys."""
    return bool(keys) and any(not keys.isdisjoint(map(tuple, part.tolist())) for part in keys_resumed(spills))


def _all_keys(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros((0, 2), np.uint64), *parts])


def _split(blocks: Iterable[bytes]) -> Iterator[bytes]:
    return (block[place : place + _KEY.size] for block in blocks for place in range(0, len(block), _KEY.size))


def _packed_name(name: bytes) -> bytes:
    return _KEY.pack(identity_hash(name_of(name)), 0)[:_HALF]


def _asked_key(location: bytes) -> bytes:
    uri = name_of(location)
    try:
        return packed_key(ImageRef.of_uri(uri, generation=look_up(uri).generation if is_web(uri) else generation_of(uri)))
    except Exception:  # noqa: BLE001  the reader of the image reports what is wrong
        return b""
