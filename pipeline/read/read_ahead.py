"""Prefetching of images on threads, bounded by count and bytes, with a circuit breaker for storage that fails."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.utils.windowed_value import WindowedValue

from pipeline.config import ReadConfig
from pipeline.failures import ImageError
from pipeline.prefetch import NoRoomError, Prefetcher, Slot, started_pool
from pipeline.read.fetch import RETRY_SECONDS, StorageUnavailableError, fetch
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.results.cancellation import steps_are_cancelled
from pipeline.stats import metrics
from pipeline.stats.process import PROCESS

GIVE_UP_SECONDS = 10 * RETRY_SECONDS
_READ_AHEAD_IMAGES = 512  # enough for the detector's next request, so that it finds its images read
_READ_AHEAD_BYTES = 64_000_000

_log = logging.getLogger(__name__)


class CircuitBreaker:
    """Circuit breaker for storage, shared by concurrent reads; thread-safe.

    While storage fails, each read is retried for `retry_seconds`. When no read has succeeded for `give_up_seconds`, the circuit
    opens: one read at a time tries once, and all others fail at once, until one succeeds.

    Args:
      retry_seconds: How long one read is retried.
      give_up_seconds: How long all reads may fail before the circuit opens.
      clock: Monotonic seconds.
    """

    def __init__(
        self,
        retry_seconds: float = RETRY_SECONDS,
        give_up_seconds: float = GIVE_UP_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._retry_seconds = retry_seconds
        self._give_up_seconds = give_up_seconds
        self._clock = clock
        self._failing_since: float | None = None
        self._probing = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def trying(self, uri: str) -> Iterator[float]:
        """Surrounds the read of a file; yields for how many seconds it may be retried.

        Raises:
          StorageUnavailableError: The circuit is open, and another read is trying.
        """
        with self._lock:
            failing_s = 0.0 if self._failing_since is None else self._clock() - self._failing_since
            given_up = self._failing_since is not None and failing_s >= self._give_up_seconds
            if given_up and self._probing:
                raise StorageUnavailableError(f"{uri} was not tried: nothing could be read from storage for {failing_s:.0f} s")
            self._probing = given_up
        try:
            yield 0.0 if given_up else self._retry_seconds
        finally:
            if given_up:
                with self._lock:
                    self._probing = False

    def failed(self, err: Exception) -> None:
        """Notes a transient failure of one try."""
        PROCESS.parts["read"].progressed()  # it has returned, and is tried again
        PROCESS.failing["storage"] = str(err)[:300]
        with self._lock:
            if self._failing_since is not None:
                return
            self._failing_since = self._clock()
        how_long = "until it is back" if math.isinf(self._retry_seconds) else f"for {self._retry_seconds:g} s"
        _log.warning("storage fails (%s); each image is tried again %s", " ".join(str(err).split())[:300], how_long)

    def succeeded(self) -> None:
        """Notes a success, which closes the circuit."""
        if self._failing_since is None:  # without the lock, as for each image but those of an outage
            return
        with self._lock:
            self._failing_since = None
        PROCESS.failing.pop("storage", None)
        _log.warning("storage is back")


class ReadAhead(beam.DoFn):
    """Prefetches images on a pool of threads, so that a fused detector does not wait for storage.

    Prefetching is bounded by count and by bytes, also for images of unknown size: a read waits for room before it takes memory.
    Each image keeps its window and timestamp. An image that has its bytes passes.

    Args:
      read: How to read.
      retry_seconds: How long an image is retried while storage fails.
      give_up_seconds: How long storage may fail for all images before they become dead letters untried.
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
        PROCESS.parts["read"].begin()
        self._pool.submit(self._read, place).add_done_callback(lambda _done: PROCESS.parts["read"].end())

    def _read(self, place: Slot[ImageRef, EncodedImage | DeadLetter]) -> None:
        if place.abandoned:
            return
        ref = place.element
        if place.held_bytes:  # started again with room for its bytes, whose size is known by now
            ref = dataclasses.replace(ref, size_bytes=place.held_bytes)
        try:
            place.result.set_result(self._read_one(ref, place))
        except NoRoomError as no_room:
            no_room.with_traceback(None)  # its frames refer to this place, and would keep its bytes until the next gc
        except BaseException as err:  # noqa: BLE001  the waiting step must see it
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
    """Reads one image, or makes the dead letter that says why it cannot be read.

    Raises:
      NoRoomError: Its bytes have no room now; see `Slot.reserve`.
    """

    def wait(err: Exception) -> None:
        patience.failed(err)
        if steps_are_cancelled():
            raise KeyboardInterrupt from err  # no dead letter
        if place.abandoned:  # nobody waits for it any more
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
