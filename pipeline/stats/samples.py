"""Samples, the few images that the report shows: those with the smallest hashes of their identity, so two runs show the same."""

from __future__ import annotations

import heapq
import math
import threading

from pipeline.records import identity_hash

_SPARE = 16  # times the samples that are wanted: enough also if only one image in ten is detected


def rank_bound(size: int, images: int) -> float:
    """A hash above the `size` smallest of so many images, even if most of the images fail.

    >>> rank_bound(12, 100), rank_bound(12, 10**9) / 2**64 * 10**9
    (inf, 192.0)
    """
    return math.inf if images <= size * _SPARE else 2.0**64 * size * _SPARE / images


class Sampler:
    """Picks, from images in any order, those that may belong to the `size` smallest hashes; thread-safe.

    Of n images it picks about `size * ln(n / size)` too many, and never one too few.
    """

    def __init__(self, size: int):
        self._size = size
        self._smallest: list[int] = []  # a heap of negated hashes: its top is the largest of the smallest
        self._lock = threading.Lock()

    def wants(self, identity: str) -> bool:
        """Whether this image has one of the smallest hashes so far."""
        number = identity_hash(identity)
        with self._lock:
            if -number in self._smallest:  # a second call: a canary failed on the image, or its bundle is retried
                return True
            if len(self._smallest) < self._size:
                heapq.heappush(self._smallest, -number)
                return True
            if self._size and number < -self._smallest[0]:
                heapq.heapreplace(self._smallest, -number)
                return True
            return False
