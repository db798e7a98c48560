"""Reading ahead of need in a feeder process: on threads, within a bound of bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pipeline.failures import ImageError
from pipeline.feed.work import Image, Limits, StoreFails
from pipeline.read.read_image import CircuitBreaker, read_image
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.stats.process import PROCESS

_GROUP = 8  # local files that one thread reads in a row: handing over one costs as much as reading it


class Read:
    """One image that is read.

    Attributes:
      ref: Which image.
      abandoned: Whether nobody needs it any more.
      held_bytes: The bytes that it holds.
      result: The image; raises `ImageError` if it cannot be read.
    """

    abandoned = False

    def __init__(self, number: int, ref: ImageRef, ahead: ReadAhead):
        self.number = number
        self.ref = ref
        self.held_bytes = 0
        self.result: Future[EncodedImage] = Future()
        self._ahead = ahead

    def reserve(self, size_bytes: int) -> None:
        """Waits until there is room for the image's bytes."""
        self._ahead.reserve(self, size_bytes)


class ReadAhead:
    """Reads images in the order in which they are needed.

    The oldest image always has room, and a thread, since threads take images in order.

    Args:
      limits: The limits.
      send: Sends the job a message when a store fails, and when it is back.
    """

    def __init__(self, limits: Limits, send: Callable[[Any], None]):
        self._limits = limits
        self._breaker = _Breaker(limits, send)
        self._pool = ThreadPoolExecutor(limits.read_threads, "read")
        self._number = self._oldest = self._held_bytes = 0
        self._changed = threading.Condition()

    def begin(self, images: Mapping[int, Image]) -> deque[Read]:
        """Begins to read images; those of which there are bytes are read already."""
        reads: deque[Read] = deque()
        local: list[Read] = []
        for image in images.values():
            read = Read(self._number, image if isinstance(image, ImageRef) else image.ref, self)
            self._number += 1
            reads.append(read)
            if isinstance(image, EncodedImage):
                read.result.set_result(image)
            elif "://" in image.uri:
                self._pool.submit(self._read, [read])
            else:
                local.append(read)
        for n in range(0, len(local), _GROUP):
            self._pool.submit(self._read, local[n : n + _GROUP])
        return reads

    def reserve(self, read: Read, size_bytes: int) -> None:
        """Waits for room; see `Read.reserve`."""
        more = size_bytes - read.held_bytes
        with self._changed:
            self._changed.wait_for(
                lambda: read.number <= self._oldest or self._held_bytes + more <= self._limits.read_ahead_bytes
            )
            self._held_bytes += more
            read.held_bytes = size_bytes

    def done(self, read: Read) -> None:
        """Frees the room of the oldest image."""
        with self._changed:
            self._oldest = read.number + 1
            self._held_bytes -= read.held_bytes
            self._changed.notify_all()

    def abandon(self, reads: Collection[Read]) -> None:
        """Ends the oldest reads, since nobody needs them any more, and frees their room."""
        for read in reads:
            read.abandoned = True
        for read in reads:
            read.result.exception()
            self.done(read)

    def take(self, read: Read) -> EncodedImage:
        """Waits for an image; reads it again if its memory was short because another image was decoded within bounds."""
        return self._read_one(read) if isinstance(read.result.exception(), MemoryError) else read.result.result()

    def _read(self, group: Sequence[Read]) -> None:
        for read in group:
            try:
                read.result.set_result(self._read_one(read))
            except BaseException as err:  # noqa: BLE001  the main thread raises it
                read.result.set_exception(err)

    def _read_one(self, read: Read) -> EncodedImage:
        found = read_image(read.ref, self._limits.max_file_bytes, self._breaker, read)
        if isinstance(found, DeadLetter):
            raise ImageError(found.stage, found.reason, found.message, found.ref.generation)
        return found


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
