"""Prefetching of images on threads, bounded by count and bytes, with a circuit breaker for stores that fail."""

from __future__ import annotations

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
from pipeline.errors import StorageAwayError
from pipeline.failures import ImageError
from pipeline.prefetch import NoRoomError, Prefetcher, Slot, started_pool
from pipeline.read.fetch import RETRY_SECONDS, StorageUnavailableError, fetch
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.results.cancellation import steps_are_cancelled
from pipeline.secrets import masked_text
from pipeline.stats import metrics
from pipeline.stats.process import PROCESS
from pipeline.storage.web import is_web

GIVE_UP_SECONDS = 10 * RETRY_SECONDS
_READ_AHEAD_IMAGES = 512  # enough for the detector's next request, so that it finds its images read
_READ_AHEAD_BYTES = 64_000_000

_SCHEMES = ("gs://", "s3://", "abfs://", "https://", "http://")

_log = logging.getLogger(__name__)


class CircuitBreaker:
    """Circuit breaker for stores, shared by concurrent reads; thread-safe. A store is all that one scheme names.

    While a store fails, each read is retried for `retry_seconds`. A store that has answered none for `give_up_seconds` is away.

    Args:
      retry_seconds: How long one read is retried.
      give_up_seconds: How long all reads of a store may fail before it is away.
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
        self._failing_since: dict[str, float] = {}
        self._answered_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def is_away(self, uri: str) -> bool:
        """Whether no read of this image's store has succeeded for long."""
        return self._clock() - self._failing_since.get(_store_of(uri), math.inf) >= self._give_up_seconds

    def has_answered(self, uri: str, since: float) -> bool:
        """Whether this image's store has answered any read since then."""
        return self._answered_at.get(_store_of(uri), -math.inf) >= since

    def retry_seconds(self, uri: str) -> float:
        """How long the read of an image is retried; not at all if it is one of many at web servers that are away."""
        return 0.0 if is_web(uri) and self.is_away(uri) else self._retry_seconds

    def failed(self, uri: str, err: Exception) -> None:
        """Notes a transient failure of one try."""
        PROCESS.parts["read"].progressed()  # it has returned, and is tried again
        said = " ".join(masked_text(str(err)).split())[:300]
        PROCESS.failing["storage"] = said
        with self._lock:
            if _store_of(uri) in self._failing_since:
                return
            self._failing_since[_store_of(uri)] = self._clock()
        is_waited_for = math.isinf(self._give_up_seconds) and not is_web(uri)
        how_long = "until it is back" if is_waited_for else f"for {self._retry_seconds:g} s"
        _log.warning("storage fails (%s); each image is tried again %s", said, how_long)

    def succeeded(self, uri: str) -> None:
        """Notes that the store of an image has answered."""
        store = _store_of(uri)
        self._answered_at[store] = self._clock()
        if store not in self._failing_since:  # without the lock, as for each image but those of an outage
            return
        with self._lock:
            self._failing_since.pop(store, None)
        PROCESS.failing.pop("storage", None)
        _log.warning("storage is back")


def _store_of(uri: str) -> str:
    return next((scheme for scheme in _SCHEMES if uri.startswith(scheme)), "")


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
      StorageAwayError: Its store is away; web servers, which are many, never are.
    """

    def wait(err: Exception) -> None:
        patience.failed(ref.uri, err)
        if steps_are_cancelled():
            raise KeyboardInterrupt from err  # no dead letter
        if place.abandoned:  # nobody waits for it any more
            raise err

    received_at, started = time.time(), time.monotonic()
    try:
        content, generation = fetch(ref, int(read.max_file_mb * 1e6), place.reserve, patience.retry_seconds(ref.uri), wait)
    except StorageUnavailableError as err:
        if patience.is_away(ref.uri) and not is_web(ref.uri):
            raise StorageAwayError(f"storage is away, and nothing could be read from it for minutes: {err}") from err
        return err.dead_letter(ref)
    except ImageError as err:
        patience.succeeded(ref.uri)  # it answered
        return err.dead_letter(ref)
    patience.succeeded(ref.uri)
    return EncodedImage(dataclasses.replace(ref, generation=generation), content, time.monotonic() - started, received_at)
