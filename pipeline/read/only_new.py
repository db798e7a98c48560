"""What of a listing is done already, by the ledger: the two meet in partitions by the images' names, each small.

On the ledger's side just the keys of rows travel (see `ledger.key_of`), a block of them for each partition; they come from the
indexes beside the rows, a column at a time. An image that was named without a generation is asked for it where an image of its
name has a row, and nowhere else.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pipeline.records import ImageRef, identity_hash, name_of
from pipeline.storage.ledger import Done, RowsFile, key_of, list_files_of_rows, read_keys
from pipeline.storage.listing import AT_ONCE
from pipeline.storage.places import generation_of

PARTITIONS = 4096  # each in memory at once: 25,000 names of 100 million
_KEY = struct.Struct("=QQ")
_FLUSHED = 1 << 20  # keys held until they are spread over the partitions: 16 MB


def partition_of(uri: str) -> int:
    """Where all that is known of an image of this name meets."""
    return identity_hash(uri) % PARTITIONS


def packed_key(ref: ImageRef) -> bytes:
    """The key of an image; empty where its generation is not known."""
    return _KEY.pack(*key_of(ref.uri, ref.generation)) if ref.generation else b""


class KeyBlocks:
    """Gathers the keys of what is done, and spreads them over the partitions."""

    def __init__(self, done: Done):
        self._done = done
        self._keys: list[np.ndarray] = []

    def read(self, files: Sequence[RowsFile]) -> Iterator[tuple[int, bytes]]:
        """Reads files of rows, a few side by side; gives (partition, keys) whenever there are enough."""
        for keys in _keys_of(files, self._done):
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


class DoneNames:
    """Which names of a partition stand for an image version that is done.

    Args:
      blocks: The keys of what is done there.
      pool: Where images are asked for their generation.
    """

    def __init__(self, blocks: Iterable[bytes], pool: ThreadPoolExecutor):
        self._keys = {block[place : place + _KEY.size] for block in blocks for place in range(0, len(block), _KEY.size)}
        self._pool = pool

    def among(self, named: Mapping[bytes, bytes]) -> set[bytes]:
        """The names that are done.

        Args:
          named: Each name with its key, which is empty where its generation is not known.
        """
        done = {name for name, key in named.items() if key in self._keys}
        have_rows = {key[: _KEY.size // 2] for key in self._keys}
        asked = [name for name, key in named.items() if not key and _KEY.pack(identity_hash(name_of(name)), 0)[:8] in have_rows]
        return done | {name for name, key in zip(asked, self._pool.map(_asked_key, asked), strict=True) if key in self._keys}


class DoneKeys(Container[ImageRef]):
    """All keys of a ledger at once, 16 bytes each: for images whose identity shows only when they are read, and for a plan.

    Args:
      output: The results folder.
      done: What counts as done.
    """

    def __init__(self, output: str, done: Done):
        keys = np.concatenate([np.zeros((0, 2), np.uint64), *_keys_of(list_files_of_rows(output), done)])
        self._keys = keys[np.argsort(keys[:, 1])]

    def __contains__(self, ref: object) -> bool:
        if not isinstance(ref, ImageRef):
            return False
        of_name, of_identity = key_of(ref.uri, ref.generation)
        place = int(np.searchsorted(self._keys[:, 1], np.uint64(of_identity)))
        return place < len(self._keys) and tuple(self._keys[place].tolist()) == (of_name, of_identity)


def _keys_of(files: Sequence[RowsFile], done: Done) -> Iterator[np.ndarray]:
    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1) * 2, "read-ledger") as pool:
        for parts in pool.map(lambda file: list(read_keys(file, done)), files):
            yield from parts


def _asked_key(name: bytes) -> bytes:
    uri = name_of(name)
    try:
        return packed_key(ImageRef(uri, generation_of(uri)))
    except Exception:  # noqa: BLE001  whatever is wrong with it, its reader will say
        return b""
