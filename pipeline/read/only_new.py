"""What of a listing is done already, by the ledger: the two meet in partitions by the images' names, each small.

On the ledger's side just the keys of rows travel (see `ledger.key_of`), a block of them for each partition; they come from the
indexes beside the rows, a column at a time. An image that was named without a generation is asked for it where an image of its
name has a row, and nowhere else.

What a killed run of the same command has spilled meets the listing in the same way, by name alone: it was read once, whatever
became of it since.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np

from pipeline.records import ImageRef, identity_hash, name_of
from pipeline.storage.completion import UNKNOWN, CompletionRule
from pipeline.storage.ledger import RowsFile, entry_of, key_of, list_files_of_rows, read_keys
from pipeline.storage.listing import MAX_PARALLEL
from pipeline.storage.listing_backends import generation_of
from pipeline.storage.results import DETECTIONS
from pipeline.storage.spill_files import SpillFile

PARTITIONS = 4096  # each in memory at once: 25,000 names of 100 million
_KEY = struct.Struct("=QQ")
_HALF = _KEY.size // 2  # the hash of the name
_ROWS_AT_ONCE = 16_384
_FLUSHED = 1 << 20  # keys held until they are spread over the partitions: 16 MB


def partition_of(uri: str) -> int:
    """Where all that is known of an image of this name meets."""
    return identity_hash(uri) % PARTITIONS


def packed_key(ref: ImageRef) -> bytes:
    """The key of an image; empty where its generation is not known."""
    return _KEY.pack(*key_of(ref.uri, ref.generation)) if ref.generation else b""


class KeyBlocks:
    """Gathers keys, and spreads them over the partitions."""

    def __init__(self) -> None:
        self._keys: list[np.ndarray] = []

    def add(self, parts: Iterable[np.ndarray]) -> Iterator[tuple[int, bytes]]:
        """Takes keys `(N, 2) uint64`; gives (partition, keys) whenever there are enough."""
        for keys in parts:
            self._keys.append(keys)
            if sum(map(len, self._keys)) >= _FLUSHED:
                yield from self.flush()

    def flush(self) -> Iterator[tuple[int, bytes]]:
        """Gives (partition, keys) of what is left."""
        if not self._keys:
            return
        keys, self._keys = np.concatenate(self._keys), []
        partitions = (keys[:, 0] % PARTITIONS).astype(np.intp)
        keys = keys[np.argsort(partitions, kind="stable")]
        numbers, starts = np.unique(np.sort(partitions), return_index=True)
        for number, block in zip(numbers.tolist(), np.split(keys, starts[1:]), strict=False):
            yield number, block.tobytes()


class CompletedNames:
    """Which names of a partition stand for an image generation that is done.

    Args:
      blocks: The keys of what is done there.
      pool: Where images are asked for their generation.
    """

    def __init__(self, blocks: Iterable[bytes], pool: ThreadPoolExecutor):
        self._keys = set(_split(blocks))
        self._pool = pool

    def among(self, named: Mapping[bytes, bytes]) -> set[bytes]:
        """The names that are done.

        Args:
          named: Each name with its key, which is empty where its generation is not known.
        """
        if not self._keys:
            return set()
        done = {name for name, key in named.items() if key in self._keys}
        have_rows = {key[:_HALF] for key in self._keys}
        asked = [name for name, key in named.items() if not key and _packed_name(name) in have_rows]
        return done | {name for name, key in zip(asked, self._pool.map(_asked_key, asked), strict=True) if key in self._keys}


class ResumedNames:
    """Which names of a partition have a row that a killed run of this command left; whatever their version is by now.

    Args:
      blocks: The keys of these rows.
    """

    def __init__(self, blocks: Iterable[bytes]):
        self._names = {key[:_HALF] for key in _split(blocks)}

    def among(self, names: Iterable[bytes]) -> dict[bytes, bytes]:
        """The names that have a row, each with what it is known by here."""
        return {name: packed for name in names if (packed := _packed_name(name)) in self._names} if self._names else {}

    def but(self, packed: Iterable[bytes]) -> int:
        """How many names have a row beside these."""
        return len(self._names.difference(packed))


class CompletedKeys(Container[ImageRef]):
    """Many keys at once, 16 bytes each: for images whose identity shows only when they are read, and for a plan.

    Args:
      parts: The keys, each part `(N, 2) uint64`.
    """

    def __init__(self, parts: Iterable[np.ndarray]):
        keys = _all_keys(parts)
        self._keys = keys[np.argsort(keys[:, 1])]

    @staticmethod
    def of(output: str, done: CompletionRule) -> CompletedKeys:
        """The keys of what is done in a results folder."""
        return CompletedKeys(keys_completed(list_files_of_rows(output), done))

    def __contains__(self, ref: object) -> bool:
        if not isinstance(ref, ImageRef):
            return False
        of_name, of_identity = key_of(ref.uri, ref.generation)
        place = int(np.searchsorted(self._keys[:, 1], np.uint64(of_identity)))
        return place < len(self._keys) and tuple(self._keys[place].tolist()) == (of_name, of_identity)


def keys_completed(files: Sequence[RowsFile], done: CompletionRule) -> Iterator[np.ndarray]:
    """The keys of what is done by files of rows, a few of which are read side by side."""
    with ThreadPoolExecutor(min(MAX_PARALLEL, os.cpu_count() or 1) * 2, "read-ledger") as pool:
        for parts in pool.map(lambda file: list(read_keys(file, done)), files):
            yield from parts


def keys_resumed(spills: Iterable[SpillFile]) -> Iterator[np.ndarray]:
    """The keys of the rows in spills."""
    for spill in spills:
        entries = filter(None, (entry_of(line, DETECTIONS, UNKNOWN) for line in spill.read()))
        while some := [key_of(entry.uri, entry.generation) for entry in islice(entries, _ROWS_AT_ONCE)]:
            yield np.array(some, np.uint64)


def done_since(spills: Iterable[SpillFile], files: Sequence[RowsFile], done: CompletionRule) -> set[tuple[int, int]]:
    """The keys of image generations that are done by rows in spills of a killed run, and by other files of rows, too.

    These came while the run was dead: its rows on top of them would be there twice.

    Args:
      spills: The run's.
      files: Files of rows that may have come since.
      done: What counts as done by them.
    """
    begun = np.unique(_all_keys(keys_resumed(spills))[:, 1])
    of_others = [part[np.isin(part[:, 1], begun)] for part in keys_completed(files, done)] if len(begun) else []
    return set(map(tuple, _all_keys(of_others).tolist()))


def has_any(spills: Iterable[SpillFile], keys: Set[tuple[int, int]]) -> bool:
    """Whether a row in spills has one of some keys."""
    return bool(keys) and any(not keys.isdisjoint(map(tuple, part.tolist())) for part in keys_resumed(spills))


def _all_keys(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros((0, 2), np.uint64), *parts])


def _split(blocks: Iterable[bytes]) -> Iterator[bytes]:
    return (block[place : place + _KEY.size] for block in blocks for place in range(0, len(block), _KEY.size))


def _packed_name(name: bytes) -> bytes:
    return _KEY.pack(identity_hash(name_of(name)), 0)[:_HALF]


def _asked_key(name: bytes) -> bytes:
    uri = name_of(name)
    try:
        return packed_key(ImageRef(uri, generation_of(uri)))
    except Exception:  # noqa: BLE001  whatever is wrong with it, its reader will say
        return b""
