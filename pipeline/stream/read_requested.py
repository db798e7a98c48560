"""`ReadRequested` reads the images that messages name, ahead of the detector, on threads, bounded by count and bytes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from pipeline.read.fetch import RETRY_SECONDS, CircuitBreaker, StorageUnavailableError, read_image
from pipeline.read.prefetch import Prefetcher, Read
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.stats import metrics
from pipeline.storage.web import is_web
from pipeline.stream.run import RunSettings, StreamStep

_READ_AHEAD_IMAGES = 512  # enough for the detector's next request, so that it finds its images read
_READ_AHEAD_BYTES = 64_000_000
_AGAIN_SECONDS = 5.0


class ReadRequested(StreamStep):
    """Reads the images that messages name; those that came with their bytes pass.

    Element in: `ImageRef` or `EncodedImage`. Elements out: `EncodedImage`, or `DeadLetter` as output `dead`, each with its window
    and timestamp. Unbounded. A read waits for room before it takes memory, also if the size of the image is unknown.

    An image is retried for a minute. While its store answers nobody, it waits, and so does the subscriber; no image waits for a
    web server, which anybody may name. If the run is stopped meanwhile, the images that wait are skipped; their messages are
    held, and delivered again after the run.

    Args:
      run: The run whose stop ends the waiting.
      retry_seconds: How long an image is retried while its store answers others.
    """

    def __init__(self, run: RunSettings, retry_seconds: float = RETRY_SECONDS):
        super().__init__(run)
        self._retry_seconds = retry_seconds

    def setup(self) -> None:
        super().setup()
        self._breaker = CircuitBreaker(self._retry_seconds, give_up_seconds=math.inf)
        self._stop = self._breaker.stop = self._shared.threads.stop
        self._ahead = Prefetcher(self._read, self._run.config.read.read_threads, _READ_AHEAD_BYTES)
        self._begun: deque[tuple[Read, Any, Any]] = deque()

    def teardown(self) -> None:
        self._abandon()
        self._ahead.close()

    def start_bundle(self) -> None:
        self._abandon()

    def process(
        self, ref: ImageRef | EncodedImage, timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[Any]:
        if isinstance(ref, EncodedImage):
            yield ref
            return
        (read,) = self._ahead.begin([ref])
        self._begun.append((read, timestamp, window))
        yield from self._pass_on(_READ_AHEAD_IMAGES)

    def finish_bundle(self) -> Iterator[Any]:
        return self._pass_on(0)

    def _pass_on(self, most_left: int) -> Iterator[Any]:
        """The oldest images, each in its window; later steps run while one is passed on, and others are read meanwhile."""
        try:
            while len(self._begun) > most_left:
                yield from self._outputs(*self._begun[0])
                self._ahead.done(self._begun.popleft()[0])
        except BaseException:
            self._abandon()
            raise

    def _outputs(self, read: Read, timestamp: Any, window: Any) -> Iterator[Any]:
        """An image, or as output `dead` its dead letter, which is counted."""
        found = read.result.result()
        windowed = WindowedValue(found, timestamp, (window or GlobalWindow(),))
        if isinstance(found, EncodedImage):
            yield windowed
        elif _is_unavailable(found) and self._stop.is_set():
            metrics.count_skipped()
            self._shared.subscriber.hold([read.ref.message_id])
        else:
            metrics.count_results(found)
            yield beam.pvalue.TaggedOutput("dead", windowed)

    def _abandon(self) -> None:
        self._ahead.abandon(read for read, _, _ in self._begun)
        self._begun.clear()

    def _read(self, read: Read) -> EncodedImage | DeadLetter:
        """Reads an image; runs on a thread."""
        began = time.monotonic()
        while True:
            found = read_image(read, self._run.config.read.max_file_bytes, self._breaker)
            if isinstance(found, EncodedImage) or not _is_unavailable(found):
                return found
            if read.abandoned or self._stop.is_set() or is_web(read.ref.uri):
                return found
            was_retried = time.monotonic() + _AGAIN_SECONDS >= began + self._retry_seconds
            if was_retried and self._breaker.has_answered(read.ref.uri, since=began):
                return found
            # also for missing credentials, which a single read does not retry
            self._breaker.failed(read.ref.uri, StorageUnavailableError(found.message))
            self._stop.wait(_AGAIN_SECONDS)


def _is_unavailable(letter: DeadLetter) -> bool:
    """Whether an image was not read because its store did not answer."""
    return (letter.stage, letter.reason) == ("read", "storage_unavailable")
