"""Samples, the few images that the report shows: those with most objects, some without any, others by a hash.

Ranks do not depend on the order of the images, so two runs show the same.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from operator import itemgetter
from typing import TypeVar

from pipeline.records import DeadLetter, DetectedImage, identity_hash

REPORT_SAMPLES = 12  # images shown in the report
ANY, MOST_OBJECTS, NOTHING_FOUND = "", "most objects", "nothing found"
_SHARE = 4  # of the samples a purpose gets at most one in four
_LEVELS = 256  # of a rank: among images of a level a hash decides, so few images are picked, whatever their order

_T = TypeVar("_T")
Ranked = dict[str, list[tuple[int, _T]]]  # (rank, value) by purpose, the smallest rank first


def ranks(image: DetectedImage | DeadLetter) -> dict[str, int]:
    """The rank of an image for each purpose that it serves, a number of 64 bits; the smallest are shown."""
    if isinstance(image, DetectedImage):
        return ranks_of(image.ref.identity, len(image.detections))
    # only images that reached the model can be decoded
    return {image.reason: identity_hash(image.ref.identity)} if image.stage == "detect" else {}


def ranks_of(identity: str, objects: int) -> dict[str, int]:
    """The ranks of an image with so many objects."""
    number, objects = identity_hash(identity), min(objects, _LEVELS)
    if not objects:
        return {ANY: number, NOTHING_FOUND: number}
    return {ANY: number, MOST_OBJECTS: ((_LEVELS - objects) * 2**64 + number) // _LEVELS}


def keep(kept: Ranked[_T], by_purpose: Mapping[str, int], value: _T, size: int) -> bool:
    """Keeps a value under each purpose for which its rank is among the smallest; whether it, or one of the same rank, is kept."""
    is_kept = False
    for purpose, rank in by_purpose.items():
        best, most = kept.get(purpose, []), size if purpose == ANY else -(-size // _SHARE)
        if len(best) < most or (best and rank <= best[-1][0]):
            by_rank = {rank: value} | dict(best)
            kept[purpose], is_kept = sorted(by_rank.items(), key=itemgetter(0))[:most], True
    return is_kept


def chosen(kept: Ranked[DetectedImage], size: int) -> list[tuple[str, DetectedImage]]:
    """Up to `size` different images with their purposes; `ANY` fills up what the purposes leave."""
    images: dict[str, tuple[str, DetectedImage]] = {}
    for purpose in (MOST_OBJECTS, NOTHING_FOUND, ANY):
        for _, image in kept.get(purpose, ()):
            images.setdefault(image.ref.identity, (purpose, image))
    return list(images.values())[:size]


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
        with self._lock:
            return self._size > 0 and keep(self._kept, ranks(image), None, self._size)

    def below(self) -> int:
        """An image is likely to be wanted if the hash of its identity is below this; 0: none is."""
        if not self._size:
            return 0
        with self._lock:
            best = self._kept.get(ANY, [])
            return best[-1][0] + 1 if len(best) >= self._size else 2**64
