"""The anti-join: which images of a listing have a row already, by the keys of the rows in the results folder."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from pipeline.records import ImageRef
from pipeline.results.completion import RowVersion, contains, row_keys
from pipeline.results.contents import Known, container_key, known_containers
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.reader import done_keys
from pipeline.storage.stores import generation_of

NEW, DETECTED, FAILED = range(3)  # what became of an image


class DoneRows(NamedTuple):
    """The rows that count as done for a job, permanent dead letters among them.

    Each process reads their keys once, 8 bytes of memory a row.

    Attributes:
      output: The results folder.
      version: Rows of this model, version and settings.
      prefixes: What the URIs of the job's images may begin with.
      run: Names the run, whose processes read the keys anew.
    """

    output: str
    version: RowVersion
    prefixes: tuple[str, ...] = ("",)
    run: str = ""

    @property
    def total(self) -> int:
        """The number of rows that count."""
        return sum(map(len, _keys(self).values()))

    def among(self, refs: Sequence[ImageRef], ask: ThreadPoolExecutor | None = None) -> np.ndarray:
        """What became of some images, as `have` has it.

        Args:
          refs: The images.
          ask: Asks storage for generations that are not known; None: images without one are not done.
        """
        unknown = [ref for ref in refs if not ref.generation]
        found = ask.map(_generation, unknown) if ask and self.total else itertools.repeat("")
        return self.have([(ref.uri, ref.generation or next(found)) for ref in refs])

    def have(self, images: Sequence[tuple[str, str]]) -> np.ndarray:
        """What became of some images, by URI and generation: `NEW`, `DETECTED` or `FAILED`, `(N,) uint8`.

        An image without a generation is new. One with both kinds of rows counts as detected.
        """
        found = np.full(len(images), NEW, np.uint8)
        if not self.total:
            return found
        model, version, settings, _ = self.version
        keys = row_keys([(uri, generation, model, version, settings) for uri, generation in images])
        for outcome, of_kind in sorted(_keys(self).items(), reverse=True):
            found[contains(of_kind, keys)] = outcome
        found[[number for number, (_, generation) in enumerate(images) if not generation]] = NEW
        return found

    def key_of(self, ref: ImageRef) -> np.uint64:
        """The key of the row of an image, or of its dead letter."""
        model, version, settings, _ = self.version
        return np.uint64(row_keys([(ref.uri, ref.generation, model, version, settings)])[0])

    def generation_of(self, ref: ImageRef) -> str:
        """The generation of an image or container that storage gives it now; empty where it does not say."""
        return _generation(ref)

    def key_of_whole(self, container: ImageRef, reading: str) -> int:
        """The key of a container, see `container_key`, of the generation that was listed, else of its present one; 0 without any.

        Args:
          container: The whole container.
          reading: The settings that decide which images it has.
        """
        generation = container.generation or self.generation_of(container)
        return container_key(container.uri, generation, self.version, reading) if generation else 0

    def known(self, key: int) -> Known | None:
        """What became of the images of a container, if all of them have rows; see `key_of_whole`."""
        return _containers(self).get(key)


@functools.lru_cache(maxsize=2)
def _containers(rows: DoneRows) -> dict[int, Known]:
    return known_containers(rows.output, _keys(rows))


@functools.lru_cache(maxsize=2)
def _keys(rows: DoneRows) -> dict[int, np.ndarray]:
    """The keys of the rows that count, sorted, by outcome."""
    kinds = {DETECTED: DETECTIONS, FAILED: DEAD_LETTERS}
    return {outcome: done_keys(rows.output, rows.version, kind, rows.prefixes) for outcome, kind in kinds.items()}


def _generation(ref: ImageRef) -> str:
    """The generation of an image; empty where storage does not say it."""
    try:
        return generation_of(ref.location)
    except Exception:  # noqa: BLE001  the reader of the image reports what is wrong
        return ""
