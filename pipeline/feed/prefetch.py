"""`Prefetcher` reads images before they are needed, on threads, within a bound of bytes. Imports neither Beam nor TensorFlow."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from pipeline.failures import Failure
from pipeline.limits import MEMORY
from pipeline.records import EncodedImage, Image, ImageRef, ref_of

_GROUP = 8  # local files that one thread reads one after another: handing over one costs as much as reading it


class Read:
    """One image that is read.

    Attributes:
      ref: Which image.
      result: The image, or why it cannot be read.
      held_bytes: The bytes that it holds.
    """

    def __init__(self, ahead: Prefetcher, number: int, ref: ImageRef):
        self.ref = ref
        self.result: Future[EncodedImage | Failure] = Future()
        self.held_bytes = 0
        self.number = number
        self._ahead = ahead

    def reserve(self, size_bytes: int) -> None:
        """Waits until there is room for the image's bytes."""
        self._ahead.reserve(self, size_bytes)


class Prefetcher:
    """Reads images in the order in which they are needed.

    The oldest image always has room, whatever its size, and a thread, since threads take images in order; so at most
    `most_bytes` and one image are held. One thread begins reads, and one takes their results.

    Args:
      read_image: Reads an image; its exceptions reach whoever takes the result.
      threads: Images that are read in parallel.
      most_bytes: Most bytes held; less where the process nears its memory limit.
    """

    def __init__(self, read_image: Callable[[Read], EncodedImage | Failure], threads: int, most_bytes: float):
        self._read_image = read_image
        self._most_bytes = most_bytes
        self._pool = ThreadPoolExecutor(threads, "read")
        self._number = self._oldest = self._held_bytes = 0
        self._changed = threading.Condition()

    def begin(self, images: Iterable[Image]) -> list[Read]:
        """Begins to read images; those that have their bytes are read already."""
        reads: list[Read] = []
        group = deque[Read]()
        for image in images:
            read = Read(self, self._number, ref_of(image))
            self._number += 1
            reads.append(read)
            if isinstance(image, EncodedImage):
                read.result.set_result(image)
                continue
            group.append(read)
            if "://" in image.uri or len(group) == _GROUP:
                self._pool.submit(self._read, group)
                group = deque()
        if group:
            self._pool.submit(self._read, group)
        return reads

    def reserve(self, read: Read, size_bytes: int) -> None:
        """Waits for room; see `Read.reserve`."""
        more = size_bytes - read.held_bytes
        if more <= 0:
            return

        def has_room() -> bool:
            return read.number <= self._oldest or self._held_bytes + more <= MEMORY.budget(self._most_bytes)

        with self._changed:
            self._changed.wait_for(has_room)
            self._held_bytes += more
            read.held_bytes = size_bytes

    def done(self, read: Read) -> None:
        """Frees the room of the oldest image."""
        with self._changed:
            self._oldest = max(self._oldest, read.number + 1)
            self._held_bytes -= read.held_bytes
            read.held_bytes = 0
            self._changed.notify_all()

    def abandon(self, reads: Iterable[Read]) -> None:
        """Frees the room of the oldest reads, which nobody takes, when each has ended."""
        for read in reads:
            read.result.add_done_callback(lambda _result, read=read: self.done(read))  # type: ignore[misc]

    def close(self) -> None:
        """Begins no more reads."""
        self._pool.shutdown(wait=False)

    def _read(self, group: deque[Read]) -> None:
        while group:
            read = group.popleft()  # a group that goes on keeps no image that is done
            try:
                read.result.set_result(self._read_image(read))
            except BaseException as err:  # noqa: BLE001  whoever takes the result must see it
                read.result.set_exception(err)
