"""`read_image` reads one image, with a circuit breaker for stores that fail. Imports neither Beam nor TensorFlow."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from pipeline.errors import StorageAwayError
from pipeline.failures import ImageError
from pipeline.read.fetch import RETRY_SECONDS, StorageUnavailableError, fetch
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.results.cancellation import steps_are_cancelled
from pipeline.secrets import masked_text
from pipeline.stats.process import PROCESS
from pipeline.storage.web import is_web

GIVE_UP_SECONDS = 10 * RETRY_SECONDS

_log = logging.getLogger(__name__)


class ReadSlot(Protocol):
    """The slot of an image among those that are read ahead."""

    @property
    def abandoned(self) -> bool:
        """Whether nobody needs the image any more."""

    def reserve(self, size_bytes: int) -> None:
        """Reserves bytes before they take memory; its exceptions end the read."""


class CircuitBreaker:
    """Circuit breaker for stores, shared by concurrent reads; thread-safe. A store is all that one scheme names.

    While a store fails, each read is retried for `retry_seconds`. A store that has answered none for `give_up_seconds` is away.

    Args:
      retry_seconds: How long one read is retried.
      give_up_seconds: How long all reads of a store may fail before it is away.
      clock: Monotonic seconds.

    Attributes:
      stop: Ends all retries once it is set.
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
        self.stop = threading.Event()
        self._failing_since: dict[str, float] = {}
        self._answered_at: dict[str, float] = {}

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
        message = " ".join(masked_text(str(err)).split())[:300]
        PROCESS.failing["storage"] = message
        if _store_of(uri) in self._failing_since:
            return
        self._failing_since[_store_of(uri)] = self._clock()
        is_waited_for = math.isinf(self._give_up_seconds) and not is_web(uri)
        how_long = "until it is back" if is_waited_for else f"for {self._retry_seconds:g} s"
        _log.warning("storage fails (%s); each image is tried again %s", message, how_long)

    def succeeded(self, uri: str) -> None:
        """Notes that the store of an image has answered."""
        store = _store_of(uri)
        self._answered_at[store] = self._clock()
        if self._failing_since.pop(store, None) is not None:
            PROCESS.failing.pop("storage", None)
            _log.warning("storage is back")


def _store_of(uri: str) -> str:
    return uri.partition("://")[0] if "://" in uri else ""


def read_image(ref: ImageRef, max_bytes: int, breaker: CircuitBreaker, slot: ReadSlot) -> EncodedImage | DeadLetter:
    """Reads one image, or makes the dead letter that says why it cannot be read.

    Raises:
      NoRoomError: Its bytes have no room now; see `ReadSlot.reserve`.
      StorageAwayError: Its store is away; web servers, which are many, never are.
    """

    def wait(err: Exception) -> None:
        breaker.failed(ref.uri, err)
        if steps_are_cancelled():
            raise KeyboardInterrupt from err  # no dead letter
        if slot.abandoned or breaker.stop.is_set():  # nobody waits for it any more
            raise err

    received_at, started = time.time(), time.monotonic()
    try:
        content, generation = fetch(ref, max_bytes, slot.reserve, breaker.retry_seconds(ref.uri), wait)
    except StorageUnavailableError as err:
        if breaker.is_away(ref.uri) and not is_web(ref.uri):
            raise StorageAwayError(f"storage is away, and nothing could be read from it for minutes: {err}") from err
        return err.dead_letter(ref)
    except ImageError as err:
        breaker.succeeded(ref.uri)  # it answered
        return err.dead_letter(ref)
    breaker.succeeded(ref.uri)
    return EncodedImage(dataclasses.replace(ref, generation=generation), content, time.monotonic() - started, received_at)
