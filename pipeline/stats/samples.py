"""Samples, the few images that the report shows: some for each purpose, and others by a hash of their identity.

Purposes: most objects, least confident, nothing found, one of each class. Ranks do not depend on the order of the images, so two
runs show the same.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import threading
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TypeVar

import numpy as np

from pipeline.records import DeadLetter, DetectedImage, identity_hash

ANY, MOST_OBJECTS, LEAST_CONFIDENT, NOTHING_FOUND, OF_CLASS = "", "most objects", "least confident", "nothing found", "class "
REPORT_SAMPLES = 12  # images shown in the report
_MOST_OF_A_PURPOSE, _MOST_CLASSES = 8, 24
_LEVELS = 256  # of a rank: among images of a level a hash decides, so few images are picked, whatever their order
_CONFIDENCE_LEVELS = 20

_T = TypeVar("_T")
Ranked = dict[str, list[tuple[int, _T]]]  # (rank, value) by purpose, the smallest rank first


def ranks(image: DetectedImage | DeadLetter) -> dict[str, int]:
    """The rank of an image for each purpose that it serves, a number of 64 bits; the smallest are shown."""
    number = identity_hash(image.ref.identity)
    if isinstance(image, DeadLetter):  # only images that reached the model can be decoded
        return {image.reason: number} if image.stage == "detect" else {}
    found = image.detections
    if not len(found):
        return {ANY: number, NOTHING_FOUND: number}
    sure = float(np.clip(np.nan_to_num(found.confidences), 0, 1).max())
    return {
        ANY: number,
        MOST_OBJECTS: _ranked(_LEVELS - min(len(found), _LEVELS), number),
        LEAST_CONFIDENT: _ranked(int(sure * _CONFIDENCE_LEVELS), number),
        **{OF_CLASS + name: number for name in found.class_names},
    }


def keep(kept: Ranked[_T], by_purpose: Mapping[str, int], value: _T, size: int) -> bool:
    """Keeps a value under each purpose for which its rank is among the smallest.

    Args:
      kept: What is kept so far.
      by_purpose: See `ranks`.
      value: The value.
      size: The number of samples that are wanted.

    Returns:
      Whether the value is kept, or another one of the same rank is.
    """
    is_kept = [_keep(kept, purpose, rank, value, size) for purpose, rank in by_purpose.items()]
    return any(is_kept)


def chosen(kept: Ranked[DetectedImage], size: int) -> list[tuple[str, DetectedImage]]:
    """Up to `size` different images with their purposes: the purposes take turns, and `ANY` fills up what they leave."""
    classes = sorted((each for each in kept if each.startswith(OF_CLASS)), key=_class_rank)
    groups = [
        [(purpose, image) for _, image in kept.get(purpose, ())] for purpose in (MOST_OBJECTS, LEAST_CONFIDENT, NOTHING_FOUND)
    ]
    groups.append([(purpose, image) for purpose in classes for _, image in kept[purpose]])
    turns = itertools.chain.from_iterable(itertools.zip_longest(*groups))
    images: dict[str, tuple[str, DetectedImage]] = {}
    for purpose, image in (*filter(None, turns), *((ANY, image) for _, image in kept.get(ANY, ()))):
        images.setdefault(image.ref.identity, (purpose, image))
    return list(images.values())[:size]


def _keep(kept: Ranked[_T], purpose: str, rank: int, value: _T, size: int) -> bool:
    wanted = _wanted(purpose, size)
    best = kept.get(purpose, [])
    if not _has_place(best, rank, wanted):
        return False
    if rank in (each for each, _ in best):
        return True
    if purpose.startswith(OF_CLASS) and not best and not _has_room_for(kept, purpose):
        return False
    bisect.insort(kept.setdefault(purpose, best), (rank, value), key=itemgetter(0))
    del best[wanted:]
    return True


def _has_place(best: Sequence[tuple[int, object]], rank: int, wanted: int) -> bool:
    """Whether a rank is among the smallest `wanted` ones."""
    return len(best) < wanted or (wanted > 0 and rank <= best[-1][0])


def _has_room_for(kept: Ranked[_T], purpose: str) -> bool:
    """Whether a class is among those with the smallest hashes; another class makes room for it."""
    classes = [each for each in kept if each.startswith(OF_CLASS)]
    if len(classes) < _MOST_CLASSES:
        return True
    last = max(classes, key=_class_rank)
    if _class_rank(purpose) > _class_rank(last):
        return False
    del kept[last]
    return True


def _wanted(purpose: str, size: int) -> int:
    """How many images are kept for a purpose."""
    if purpose == ANY:
        return size
    return min(1 if purpose.startswith(OF_CLASS) else _MOST_OF_A_PURPOSE, math.ceil(size / 4))


def _ranked(level: int, number: int) -> int:
    return (level * 2**64 + number) // _LEVELS


@functools.lru_cache(4096)
def _class_rank(purpose: str) -> int:
    return identity_hash(purpose)


class Sampler:
    """Picks, from images in any order, those that may be among the `size` samples of the job; thread-safe.

    Of n images it picks about `size * ln(n / size)` too many for each purpose and level of rank, and never one too few.
    """

    def __init__(self, size: int):
        self._size = size
        self._kept: Ranked[None] = {}
        self._lock = threading.Lock()

    def wants(self, image: DetectedImage | DeadLetter) -> bool:
        """Whether this image has one of the smallest ranks so far; so has one that comes again."""
        if not self._size:
            return False
        with self._lock:
            return keep(self._kept, ranks(image), None, self._size)

    def wants_any(self, identity: str) -> bool:
        """Whether the image with this identity has one of the smallest ranks of `ANY` so far, so that `wants` is likely."""
        with self._lock:
            return _has_place(self._kept.get(ANY, ()), identity_hash(identity), self._size)


class NewestImages:
    """Keeps the newest images with a thumbnail; asks for one every two seconds while somebody looks at the live page."""

    _KEPT = 12
    _EVERY_S = 2.0
    _LOOKED_AT_S = 10.0

    def __init__(self) -> None:
        self._images: tuple[tuple[int, DetectedImage], ...] = ()  # replaced as a whole: threads share it
        self._looked_at = -math.inf
        self._next = -math.inf

    def wants(self) -> bool:
        """Whether the next image gets a thumbnail."""
        now = time.monotonic()
        if now - self._looked_at > self._LOOKED_AT_S or now < self._next:
            return False
        self._next = now + self._EVERY_S
        return True

    def add(self, image: DetectedImage) -> None:
        """Keeps an image that has a thumbnail."""
        self._images = ((time.time_ns(), image), *self._images)[: self._KEPT]

    def look(self) -> tuple[tuple[int, DetectedImage], ...]:
        """The newest images, the last one first, each with a number of its own."""
        self._looked_at = time.monotonic()
        return self._images
