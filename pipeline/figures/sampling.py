"""Which few images the report shows: those whose identity has the smallest hash, so that two runs show the same ones."""

from __future__ import annotations

import hashlib
import heapq
import threading

from pipeline.records import name_bytes


def sample_rank(identity: str) -> int:
    """A fixed pseudo-random number for an image; the images with the smallest ones are the sample."""
    return int.from_bytes(hashlib.blake2b(name_bytes(identity), digest_size=8).digest(), "big")


class Sampler:
    """Tells, while images pass by in any order, which may still belong to the `size` smallest ranks; thread-safe.

    Of n images it picks about `size * ln(n / size)` too many, and never one too few.
    """

    def __init__(self, size: int):
        self._size = size
        self._smallest: list[int] = []  # a heap of negated ranks: its top is the largest of the smallest
        self._lock = threading.Lock()

    def wants(self, identity: str) -> bool:
        """Whether this image is among the smallest ranks seen so far."""
        rank = sample_rank(identity)
        with self._lock:
            if len(self._smallest) < self._size:
                heapq.heappush(self._smallest, -rank)
                return True
            if self._size and rank < -self._smallest[0]:
                heapq.heapreplace(self._smallest, -rank)
                return True
            return False
