"""Prefetching of images on threads, bounded by count and bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.utils.windowed_value import WindowedValue

from pipeline.config import ReadConfig
from pipeline.prefetch import NoRoomError, Prefetcher, Slot, started_pool
from pipeline.read.fetch import RETRY_SECONDS
from pipeline.read.read_image import GIVE_UP_SECONDS, CircuitBreaker, read_image
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.stats import metrics
from pipeline.stats.process import PROCESS

_READ_AHEAD_IMAGES = 512  # enough for the detector's next request, so that it finds its images read
_READ_AHEAD_BYTES = 64_000_000


class ReadAhead(beam.DoFn):
    """Prefetches images on a pool of threads, so that a fused detector does not wait for storage.

    Prefetching is bounded by count and by bytes, also for images of unknown size: a read waits for room before it takes memory.
    Each image keeps its window and timestamp. An image that has its bytes passes.

    Args:
      read: How to read.
      retry_seconds: How long an image is retried while storage fails.
      give_up_seconds: How long a store may fail for all images before the job ends.
    """

    def __init__(self, read: ReadConfig, retry_seconds: float = RETRY_SECONDS, give_up_seconds: float = GIVE_UP_SECONDS):
        self._settings = read
        self._retry_seconds = retry_seconds
        self._give_up_seconds = give_up_seconds

    def setup(self) -> None:
        self._breaker = CircuitBreaker(self._retry_seconds, self._give_up_seconds)
        self._pool = started_pool(self._settings.read_threads, "read")

    def teardown(self) -> None:
        self._ahead.abandoned = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start_bundle(self) -> None:
        self._ahead: Prefetcher[ImageRef, EncodedImage | DeadLetter] = Prefetcher(
            self._start, _READ_AHEAD_IMAGES, _READ_AHEAD_BYTES
        )

    def process(
        self, ref: ImageRef | EncodedImage, timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[Any]:
        if isinstance(ref, EncodedImage):
            yield ref
        else:
            yield from self._parts(self._ahead.add(ref, timestamp, window))

    def finish_bundle(self) -> Iterator[Any]:
        return self._parts(self._ahead.rest())

    def _parts(self, reads: Iterator[WindowedValue]) -> Iterator[Any]:
        """The images, and as output `dead` the dead letters, which are counted."""
        for read in reads:
            if isinstance(read.value, EncodedImage):
                yield read
            else:
                metrics.count_results(read.value)
                yield beam.pvalue.TaggedOutput("dead", read)

    def _start(self, slot: Slot[ImageRef, EncodedImage | DeadLetter]) -> None:
        PROCESS.parts["read"].begin()
        self._pool.submit(self._read, slot).add_done_callback(lambda _done: PROCESS.parts["read"].end())

    def _read(self, slot: Slot[ImageRef, EncodedImage | DeadLetter]) -> None:
        if slot.abandoned:
            return
        ref = slot.element
        if slot.held_bytes:  # started again with room for its bytes, whose size is known by now
            ref = dataclasses.replace(ref, size_bytes=slot.held_bytes)
        try:
            slot.result.set_result(self._read_one(ref, slot))
        except NoRoomError as no_room:
            no_room.with_traceback(None)  # its frames refer to this slot, and would keep its bytes until the next gc
        except BaseException as err:  # noqa: BLE001  the waiting step must see it
            slot.result.set_exception(err)

    def _read_one(self, ref: ImageRef, slot: Slot[ImageRef, EncodedImage | DeadLetter]) -> EncodedImage | DeadLetter:
        return read_image(ref, int(self._settings.max_file_mb * 1e6), self._breaker, slot)
