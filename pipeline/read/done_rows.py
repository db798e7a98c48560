"""The anti-join: which images of a listing have a row already, by the keys of the rows in the results folder."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from pipeline.records import ImageRef
from pipeline.results.completion import RowVersion, row_keys
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

    def among(self, refs: Sequence[ImageRef], ask: ThreadPoolExecutor | None = None) -> np.ndarray:
        """Which of some images are done, `(N,) bool`.

        Args:
          refs: The images.
          ask: Asks storage for generations that are not known; None: images without one are not done.
        """
        unknown = [ref for ref in refs if not ref.generation]
        found = ask.map(_generation, unknown) if ask and len(self.keys) else itertools.repeat("")
        return self.have([(ref.uri, ref.generation or next(found)) for ref in refs])

    def have(self, images: Sequence[tuple[str, str]]) -> np.ndarray:
        """Which of some images are done, `(N,) bool`, by URI and generation; those without a generation are not."""
        if not len(self.keys):
            return np.zeros(len(images), bool)
        model, version, settings, _ = self.version
        done = contains(self.keys, row_keys([(uri, generation, model, version, settings) for uri, generation in images]))
        done[[number for number, (_, generation) in enumerate(images) if not generation]] = False
        return done


@functools.lru_cache(maxsize=2)
def _keys(rows: DoneRows) -> np.ndarray:
    return done_keys(rows.output, rows.version, failed_too=rows.failed_too, prefixes=rows.prefixes)


def _generation(ref: ImageRef) -> str:
    """The generation of an image; empty where storage does not say it."""
    try:
        return generation_of(ref.location)
    except Exception:  # noqa: BLE001  the reader of the image reports what is wrong
        return ""
