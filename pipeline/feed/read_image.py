"""Reads one image, with a circuit breaker for stores that fail."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from pipeline.errors import AwayError
from pipeline.failures import Failure
from pipeline.feed.prefetch import Read
from pipeline.limits import memory_room_bytes
from pipeline.process import PROCESS
from pipeline.records import EncodedImage, ImageRef
from pipeline.secrets import masked_text
from pipeline.storage.fetch import RETRY_SECONDS, fetch
from pipeline.storage.web import is_web

GIVE_UP_SECONDS = 10 * RETRY_SECONDS
_AGAIN_SECONDS = 5.0

_log = logging.getLogger(__name__)


def note_storage(failure: str, how_long: str = "") -> None:
    """Notes for this process that storage fails, and how long each image is tried again; without a failure, that it is back."""
    PROCESS.parts["read"].progressed()  # a try has returned
    if failure and "storage" not in PROCESS.failing:
        _log.warning("storage fails (%s); each image is tried again %s", failure, how_long)
        PROCESS.failing.add("storage")
    elif not failure and "storage" in PROCESS.failing:
        _log.warning("storage is back")
        PROCESS.failing.discard("storage")


class CircuitBreaker:
    """Circuit breaker for stores, shared by concurrent reads; thread-safe. A store is all that one scheme names.

    While a store fails, each read is retried for `retry_seconds`. A store that has answered none for `give_up_seconds` is away.
    An image that a message names waits for its store until this has answered another read, since the message can be held.

    Args:
      retry_seconds: How long one read is retried.
      give_up_seconds: How long all reads of a store may fail before it is away.
      note: See `note_storage`.
      clock: Monotonic seconds.

    Attributes:
      stop: Ends all retries and all waiting once it is set.
    """

    def __init__(
        self,
        retry_seconds: float = RETRY_SECONDS,
        give_up_seconds: float = GIVE_UP_SECONDS,
        note: Callable[[str, str], object] = note_storage,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._retry_seconds = retry_seconds
        self._give_up_seconds = give_up_seconds
        self._note = note
        self._clock = clock
        self.stop = threading.Event()
        self._failing_since: dict[str, float] = {}
        self._answered_at: dict[str, float] = {}

    def is_away(self, uri: str) -> bool:
        """Whether no read of this image's store has succeeded for long."""
        return self._clock() - self._failing_since.get(store_name(uri), math.inf) >= self._give_up_seconds

    def retry_seconds(self, uri: str) -> float:
        """How long the read of an image is retried; not at all if it is one of many at web servers that are away."""
        return 0.0 if is_web(uri) and self.is_away(uri) else self._retry_seconds

    def failed(self, ref: ImageRef, failure: str) -> None:
        """Notes a transient failure of one try."""
        self._failing_since.setdefault(store_name(ref.uri), self._clock())
        how_long = "until it is back" if _waits_for_store(ref) else f"for {self._retry_seconds:g} s"
        self._note(" ".join(masked_text(failure).split())[:300], how_long)

    def waits(self, ref: ImageRef, began: float) -> bool:
        """Whether an image whose reading began then is read again, though its store has failed for as long as one is retried."""
        is_retried = self._clock() + _AGAIN_SECONDS >= began + self._retry_seconds
        has_answered = self._answered_at.get(store_name(ref.uri), -math.inf) >= began
        return _waits_for_store(ref) and not (is_retried and has_answered) and not self.stop.is_set()

    def succeeded(self, uri: str) -> None:
        """Notes that the store of an image has answered."""
        store = store_name(uri)
        self._answered_at[store] = self._clock()
        if self._failing_since.pop(store, None) is not None:
            self._note("", "")


def store_name(uri: str) -> str:
    """The scheme of an image's store; empty for this machine's files."""
    return uri.partition("://")[0] if "://" in uri else ""


def _waits_for_store(ref: ImageRef) -> bool:
    """Whether an image waits for a store that is away. None does for a web server, which anybody may name."""
    return bool(ref.message_id) and not is_web(ref.uri)


def read_image(read: Read, max_bytes: int, breaker: CircuitBreaker) -> EncodedImage | Failure:
    """Reads one image, or says why it cannot be read.

    Raises:
      AwayError: Its store is away, and the image waits for none.
      MemoryError: Memory is short, though it has room for such an image.
    """
    began = time.monotonic()
    while True:
        found = _read_image(read, max_bytes, breaker)
        if isinstance(found, EncodedImage) or found.reason != "storage_unavailable" or not breaker.waits(read.ref, began):
            return found
        breaker.failed(read.ref, found.message)  # also for missing credentials, which a single read does not retry
        breaker.stop.wait(_AGAIN_SECONDS)


def _read_image(read: Read, max_bytes: int, breaker: CircuitBreaker) -> EncodedImage | Failure:
    ref = read.ref

    def wait(err: Exception) -> None:
        breaker.failed(ref, str(err))
        if breaker.stop.is_set():
            raise err

    try:
        found = fetch(ref, max_bytes, read.reserve, breaker.retry_seconds(ref.uri), wait)
    except MemoryError:
        if read.held_bytes <= memory_room_bytes():
            raise  # memory was short for a moment
        message = f"{ref.uri} has {read.held_bytes / 1e6:.0f} MB, which do not fit into memory; max_file_mb sets the limit"
        return Failure("read", "unreadable", message)
    if isinstance(found, EncodedImage) or found.reason != "storage_unavailable":
        breaker.succeeded(ref.uri)  # it answered
    elif breaker.is_away(ref.uri) and not (is_web(ref.uri) or ref.message_id):
        raise AwayError(f"storage is away, and nothing could be read from it for minutes: {found.message}")
    return found
