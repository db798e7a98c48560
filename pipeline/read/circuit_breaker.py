"""How long reads wait for a storage that fails: each of them for a while, but a job of a million images not a million times."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator

from pipeline.read.fetch import RETRY_SECONDS, StorageUnavailableError

GIVE_UP_SECONDS = 10 * RETRY_SECONDS

_log = logging.getLogger(__name__)


class CircuitBreaker:
    """Shared by reads that go on at the same time; thread-safe.

    While storage fails each read tries again for `retry_seconds`. When none has succeeded for `give_up_seconds`, storage is not
    about to come back: one read at a time tries once, and all others fail at once, until one succeeds.

    Args:
      retry_seconds: How long one read goes on trying.
      give_up_seconds: How long none may have succeeded before reads are given up untried.
      clock: Seconds that go on, whatever is done to the time of day.
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
        """Surrounds the read of a file; gives how long it may go on trying, in seconds.

        Raises:
          StorageUnavailableError: Not at all.
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
        """Notes that one try failed transiently."""
        with self._lock:
            if self._failing_since is not None:
                return
            self._failing_since = self._clock()
        how_long = "until it is back" if math.isinf(self._retry_seconds) else f"for {self._retry_seconds:g} s"
        _log.warning("storage fails (%s); each image is tried again %s", " ".join(str(err).split())[:300], how_long)

    def succeeded(self) -> None:
        """Notes that storage did what it was asked."""
        if self._failing_since is None:  # without the lock, as for each image but those of an outage
            return
        with self._lock:
            self._failing_since = None
        _log.warning("storage is back")
