"""`ReadRequested`: reads the images that messages name; while storage fails, the stream waits."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator
from typing import NamedTuple, TypeGuard

import apache_beam as beam

from pipeline.config import ReadConfig
from pipeline.prefetch import Slot
from pipeline.read.fetch import StorageUnavailableError
from pipeline.read.read_ahead import CircuitBreaker, ReadAhead
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.stream.run import RunSettings, run_of

_AGAIN_SECONDS = 5.0


class ReadOrDead(NamedTuple):
    """The outputs of `ReadRequested`."""

    images: beam.PCollection[EncodedImage]
    dead: beam.PCollection[DeadLetter]


@dataclasses.dataclass
class ReadRequested(beam.PTransform):
    """Reads the images that messages name; those that came with their bytes pass.

    Element in: `ImageRef` or `EncodedImage`. Elements out: `EncodedImage` or `DeadLetter`. Unbounded. While storage fails, its
    images wait, and so does the subscriber. If the run is stopped meanwhile, these images have no outcome: their messages are not
    acknowledged, and Pub/Sub delivers them again.

    Args:
      read: How to read.
      run: The run whose stop ends the waiting.
    """

    read: ReadConfig
    run: RunSettings

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, requested: beam.PCollection[ImageRef | EncodedImage]) -> ReadOrDead:
        """Wires the reading DoFn of batch jobs with endless retries, and the return of images unread at a stop."""
        read = requested | "ReadAhead" >> beam.ParDo(_ReadGuarded(self.read, self.run)).with_outputs("dead", main="images")
        return ReadOrDead(read.images, read.dead | "GiveBack" >> beam.ParDo(_Nack(self.run)))


class _ReadGuarded(ReadAhead):
    def __init__(self, read: ReadConfig, run: RunSettings):
        super().__init__(read)
        self._run = run

    def setup(self) -> None:
        super().setup()
        self._stop = run_of(self._run).threads.stop
        self._patience = self._waiting = _BreakerUntilStopped(self._stop)

    def _read_one(self, ref: ImageRef, place: Slot[ImageRef, EncodedImage | DeadLetter]) -> EncodedImage | DeadLetter:
        while True:
            read = super()._read_one(ref, place)
            if not _is_unavailable(read) or place.abandoned or self._stop.is_set():
                return read
            self._waiting.note(read)  # also for missing credentials, which a single read does not retry
            self._stop.wait(_AGAIN_SECONDS)


class _BreakerUntilStopped(CircuitBreaker):
    """Retries until the run is stopped."""

    def __init__(self, stop: threading.Event):
        super().__init__(retry_seconds=math.inf, give_up_seconds=math.inf)
        self._stop = stop

    def failed(self, err: Exception) -> None:
        super().failed(err)
        if self._stop.is_set():
            raise err

    def note(self, unread: DeadLetter) -> None:
        """Notes an image that could not be read now."""
        super().failed(StorageUnavailableError(unread.message))


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
