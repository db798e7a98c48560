"""`ReadRequested`: reads the images that messages name; while a store answers nobody, the stream waits."""

from __future__ import annotations

import math
import threading
import time
from typing import TypeGuard

from pipeline.prefetch import Slot
from pipeline.read.fetch import RETRY_SECONDS, StorageUnavailableError
from pipeline.read.read_ahead import ReadAhead
from pipeline.read.read_image import CircuitBreaker
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, ImageRef
from pipeline.storage.web import is_web
from pipeline.stream.run import RunSettings, run_of

_AGAIN_SECONDS = 5.0


class ReadRequested(ReadAhead):
    """Reads the images that messages name; those that came with their bytes pass.

    Element in: `ImageRef` or `EncodedImage`. Elements out: `EncodedImage`, or `DeadLetter` as output `dead`. Unbounded. An image
    is retried for a minute. While its store answers nobody, it waits, and so does the subscriber; no image waits for a web
    server, which anybody may name. If the run is stopped meanwhile, the images that wait are `storage_unavailable`.

    Args:
      run: The run whose stop ends the waiting.
      retry_seconds: How long an image is retried while its store answers others.
    """

    def __init__(self, run: RunSettings, retry_seconds: float = RETRY_SECONDS):
        super().__init__(run.config.read, retry_seconds)
        self._run = run

    def setup(self) -> None:
        super().setup()
        self._stop = run_of(self._run).threads.stop
        self._breaker = _BreakerUntilStopped(self._stop, self._retry_seconds)

    def _read_one(self, ref: ImageRef, slot: Slot[ImageRef, EncodedImage | DeadLetter]) -> EncodedImage | DeadLetter:
        began = time.monotonic()
        while True:
            read = super()._read_one(ref, slot)
            if not is_unavailable(read) or slot.abandoned or self._stop.is_set() or is_web(ref.uri):
                return read
            was_retried = time.monotonic() + _AGAIN_SECONDS >= began + self._retry_seconds
            if was_retried and self._breaker.has_answered(ref.uri, since=began):
                return read
            # also for missing credentials, which a single read does not retry
            CircuitBreaker.failed(self._breaker, ref.uri, StorageUnavailableError(read.message))
            self._stop.wait(_AGAIN_SECONDS)


class _BreakerUntilStopped(CircuitBreaker):
    """Takes no store for away, and ends retries when the run is stopped."""

    def __init__(self, stop: threading.Event, retry_seconds: float):
        super().__init__(retry_seconds, give_up_seconds=math.inf)
        self._stop = stop

    def failed(self, uri: str, err: Exception) -> None:
        super().failed(uri, err)
        if self._stop.is_set():
            raise err


def is_unavailable(result: EncodedImage | DetectedImage | DeadLetter) -> TypeGuard[DeadLetter]:
    """Whether an image was not read because its store did not answer."""
    return isinstance(result, DeadLetter) and (result.stage, result.reason) == ("read", "storage_unavailable")
