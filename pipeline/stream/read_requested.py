"""`ReadRequested`: reads the images that messages name; while a store answers nobody, the stream waits."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple, TypeGuard

import apache_beam as beam

from pipeline.config import ReadConfig
from pipeline.prefetch import Slot
from pipeline.read.fetch import RETRY_SECONDS, StorageUnavailableError
from pipeline.read.read_ahead import ReadAhead
from pipeline.read.read_image import CircuitBreaker
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.storage.web import is_web
from pipeline.stream.run import RunSettings, run_of

_AGAIN_SECONDS = 5.0


class ReadOrDead(NamedTuple):
    """The outputs of `ReadRequested`."""

    images: beam.PCollection[EncodedImage]
    dead: beam.PCollection[DeadLetter]


@dataclasses.dataclass
class ReadRequested(beam.PTransform):
    """Reads the images that messages name; those that came with their bytes pass.

    Element in: `ImageRef` or `EncodedImage`. Elements out: `EncodedImage` or `DeadLetter`. Unbounded. Each image is
    retried for a minute. While its store answers nobody, it waits, and so does the subscriber; no image waits for a web server,
    which anybody may name. If the run is stopped meanwhile, waiting images have no outcome: their messages are not acknowledged,
    and Pub/Sub delivers them again.

    Args:
      read: How to read.
      run: The run whose stop ends the waiting.
    """

    read: ReadConfig
    run: RunSettings

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, requested: beam.PCollection[ImageRef | EncodedImage]) -> ReadOrDead:
        """Wires the reading DoFn of batch jobs, which waits, and the return of images unread at a stop."""
        read = requested | "ReadAhead" >> beam.ParDo(_ReadGuarded(self.read, self.run)).with_outputs("dead", main="images")
        return ReadOrDead(read.images, read.dead | "GiveBack" >> beam.ParDo(_Nack(self.run)))


class _ReadGuarded(ReadAhead):
    def __init__(self, read: ReadConfig, run: RunSettings, retry_seconds: float = RETRY_SECONDS):
        super().__init__(read, retry_seconds)
        self._run = run

    def setup(self) -> None:
        super().setup()
        self._stop = run_of(self._run).threads.stop
        self._patience = self._waiting = _BreakerUntilStopped(self._stop, self._retry_seconds)

    def _read_one(self, ref: ImageRef, place: Slot[ImageRef, EncodedImage | DeadLetter]) -> EncodedImage | DeadLetter:
        began = time.monotonic()
        while True:
            read = super()._read_one(ref, place)
            if not _is_unavailable(read) or place.abandoned or self._stop.is_set() or is_web(ref.uri):
                return read
            was_retried = time.monotonic() + _AGAIN_SECONDS >= began + self._retry_seconds
            if was_retried and self._waiting.has_answered(ref.uri, since=began):
                return read
            self._waiting.note(read)  # also for missing credentials, which a single read does not retry
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

    def note(self, unread: DeadLetter) -> None:
        """Notes an image that could not be read now."""
        super().failed(unread.ref.uri, StorageUnavailableError(unread.message))


class _Nack(beam.DoFn):
    """Removes images that were unread when the run was stopped; their failure is the stop, not theirs."""

    def __init__(self, run: RunSettings):
        self._run = run

    def setup(self) -> None:
        self._shared = run_of(self._run)

    def process(self, letter: DeadLetter) -> Iterator[DeadLetter]:
        if _is_unavailable(letter) and self._shared.threads.stop.is_set():
            self._shared.nack(letter.ref)
        else:
            yield letter


def _is_unavailable(read: EncodedImage | DeadLetter) -> TypeGuard[DeadLetter]:
    return isinstance(read, DeadLetter) and (read.stage, read.reason) == ("read", "storage_unavailable")
