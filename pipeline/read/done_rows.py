"""The anti-join: which images of a listing have a row already, by the keys of the rows in the results folder."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from pipeline.records import ImageRef
from pipeline.results.completion import RowVersion
from pipeline.results.shards import contains, done_keys
from pipeline.storage.stores import generation_of


class DoneRows(NamedTuple):
    """The rows that count as done for a job. Each process reads their keys once, 8 bytes of memory a row.

    Attributes:
      output: The results folder.
      version: Rows of this model, version and settings.
      failed_too: Whether permanent dead letters count.
      prefixes: What the URIs of the job's images may begin with.
      run: Names the run, whose processes read the keys anew.
    """

    output: str
    version: RowVersion
    failed_too: bool = True
    prefixes: tuple[str, ...] = ("",)
    run: str = ""

    @property
    def keys(self) -> np.ndarray:
        """The keys, sorted."""
        return _keys(self)

    def has(self, ref: ImageRef) -> bool:
        """Whether an image is done."""
        return bool(self.among([ref]))

    def among(self, refs: Iterable[ImageRef], pool: ThreadPoolExecutor | None = None) -> set[str]:
        """The URIs of those of some images that are done.

        Args:
          refs: The images. Where a generation is not known, storage is asked for it.
          pool: For these requests.
        """
        if not len(self.keys):
            return set()
        known = list((pool.map if pool else map)(_with_generation, refs))
        wanted = np.fromiter((self.version.key(*each) for each in known), np.uint64, len(known))
        found = contains(self.keys, wanted)
        return {uri for (uri, generation), is_done in zip(known, found.tolist(), strict=True) if is_done and generation}


@functools.lru_cache(maxsize=2)
def _keys(rows: DoneRows) -> np.ndarray:
    return done_keys(rows.output, rows.version, failed_too=rows.failed_too, prefixes=rows.prefixes)


def _with_generation(ref: ImageRef) -> tuple[str, str]:
    """The URI and the generation of an image; the latter is empty where storage does not say it."""
    if ref.generation:
        return ref.uri, ref.generation
    try:
        return ref.uri, generation_of(ref.location)
    except Exception:  # noqa: BLE001  the reader of the image reports what is wrong
        return ref.uri, ""
