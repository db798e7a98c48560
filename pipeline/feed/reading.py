"""Reading ahead of need in a feeder process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.failures import ImageError
from pipeline.feed.work import Limits, StoreFails
from pipeline.read.fetch import CircuitBreaker, read_image
from pipeline.read.prefetch import Prefetcher, Read
from pipeline.records import DeadLetter, EncodedImage
from pipeline.stats.process import PROCESS


class ReadAhead(Prefetcher):
    """Reads the images of `Work`, in order.

    Args:
      limits: The limits.
      send: Sends `StoreFails` to the job's process.
    """

    def __init__(self, limits: Limits, send: Callable[[Any], None]):
        super().__init__(self._read_one, limits.read_threads, limits.read_ahead_bytes)
        self._max_file_bytes = limits.max_file_bytes
        self._breaker = _Breaker(limits, send)

    def take(self, read: Read) -> EncodedImage:
        """Waits for an image; reads it again if its memory was short because another image was decoded within bounds."""
        found = self._read_one(read) if isinstance(read.result.exception(), MemoryError) else read.result.result()
        if isinstance(found, DeadLetter):
            raise ImageError(found.stage, found.reason, found.message, found.ref.generation)
        return found

    def _read_one(self, read: Read) -> EncodedImage | DeadLetter:
        return read_image(read, self._max_file_bytes, self._breaker)


class _Breaker(CircuitBreaker):
    """Tells the job that a store fails, and that it is back."""

    def __init__(self, limits: Limits, send: Callable[[Any], None]):
        super().__init__(limits.retry_seconds, limits.give_up_seconds)
        self._tell = send
        self._fails = False

    def failed(self, uri: str, err: Exception) -> None:
        super().failed(uri, err)
        self._fails = True
        self._tell(StoreFails(PROCESS.failing.get("storage", "")))

    def succeeded(self, uri: str) -> None:
        super().succeeded(uri)
        if self._fails and "storage" not in PROCESS.failing:
            self._fails = False
            self._tell(StoreFails(""))
