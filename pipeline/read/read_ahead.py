"""Reads images on threads, ahead of the steps behind: as many as those will soon want, in the bytes that there is room for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.utils.windowed_value import WindowedValue

from pipeline.config import ReadConfig
from pipeline.failures import ImageError
from pipeline.prefetch import NoRoomError, Prefetcher, Slot, started_pool
from pipeline.read.circuit_breaker import GIVE_UP_SECONDS, CircuitBreaker
from pipeline.read.fetch import RETRY_SECONDS, StorageUnavailableError, fetch
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.stats import metrics

_READ_AHEAD_IMAGES = 512  # enough for the detector's next request, so that it finds its images read
_READ_AHEAD_BYTES = 64_000_000


class ReadAhead(beam.DoFn):
    """Reads images on a pool of threads, ahead of the steps behind it.

    Those steps run while this one yields; the reads go on meanwhile, so that a detector which is fused with it never waits for
    storage. Bounded by count and by bytes, also where no size was listed: a read waits until its bytes have room before it takes
    them. Each image keeps its window and timestamp; one that has its bytes already passes.

    Args:
      read: How to read.
      retry_seconds: How long an image is tried again while storage fails transiently.
      give_up_seconds: How long storage may fail for all images before they are dead letters untried.
    """

    def __init__(self, read: ReadConfig, retry_seconds: float = RETRY_SECONDS, give_up_seconds: float = GIVE_UP_SECONDS):
        self._settings = read
        self._retry_seconds = retry_seconds
        self._give_up_seconds = give_up_seconds

    def setup(self) -> None:
        self._patience = CircuitBreaker(self._retry_seconds, self._give_up_seconds)
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
            yield from map(_part, self._ahead.add(ref, timestamp, window))

    def finish_bundle(self) -> Iterator[Any]:
        return map(_part, self._ahead.rest())

    def _start(self, place: Slot[ImageRef, EncodedImage | DeadLetter]) -> None:
        self._pool.submit(self._read, place)

    def _read(self, place: Slot[ImageRef, EncodedImage | DeadLetter]) -> None:
        if place.abandoned:
            return
        ref = place.element
        if place.held_bytes:  # started again with room for what it has; no need to look again how much that is
            ref = dataclasses.replace(ref, size_bytes=place.held_bytes)
        try:
            place.result.set_result(self._read_one(ref, place))
        except NoRoomError as no_room:
            no_room.with_traceback(None)  # its frames, which know this place, would keep what is read into it until the next gc
        except BaseException as err:  # noqa: BLE001  whoever waits for the result must learn of it
            place.result.set_exception(err)

    def _read_one(self, ref: ImageRef, place: Slot[ImageRef, EncodedImage | DeadLetter]) -> EncodedImage | DeadLetter:
        return read_image(ref, self._settings, self._patience, place)


def _part(read: WindowedValue) -> Any:
    if isinstance(read.value, EncodedImage):
        return read
    metrics.count_result(read.value)
    return beam.pvalue.TaggedOutput("dead", read)


def read_image(
    ref: ImageRef, read: ReadConfig, patience: CircuitBreaker, place: Slot[ImageRef, EncodedImage | DeadLetter]
) -> EncodedImage | DeadLetter:
    """Reads one image in its place; what cannot be read becomes a dead letter that says why.

    Raises:
      NoRoomError: Not now; see `Slot.reserve`.
    """

    def wait(err: Exception) -> None:
        patience.failed(err)
        if place.abandoned:  # by whoever would have waited for it
            raise err

    received_at, started = time.time(), time.monotonic()
    try:
        with patience.trying(ref.uri) as retry_seconds:
            content, generation = fetch(ref, int(read.max_file_mb * 1e6), place.reserve, retry_seconds, wait)
    except StorageUnavailableError as err:
        return err.dead_letter(ref)
    except ImageError as err:
        patience.succeeded()  # it answered
        return err.dead_letter(ref)
    patience.succeeded()
    return EncodedImage(dataclasses.replace(ref, generation=generation), content, time.monotonic() - started, received_at)
