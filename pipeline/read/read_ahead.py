"""`ReadAhead` prefetches images in a pipeline, on threads, bounded by count and bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from pipeline.config import ReadConfig
from pipeline.read.fetch import GIVE_UP_SECONDS, RETRY_SECONDS, CircuitBreaker, read_image
from pipeline.read.prefetch import Prefetcher, Read
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.stats import metrics

_READ_AHEAD_IMAGES = 512  # enough for the detector's next request, so that it finds its images read
_READ_AHEAD_BYTES = 64_000_000


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
        self._breaker = CircuitBreaker(self._retry_seconds, self._give_up_seconds)
        self._ahead = Prefetcher(self._read, self._settings.read_threads, _READ_AHEAD_BYTES)
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
        windowed = WindowedValue(read.result.result(), timestamp, (window or GlobalWindow(),))
        if isinstance(windowed.value, EncodedImage):
            yield windowed
        else:
            metrics.count_results(windowed.value)
            yield beam.pvalue.TaggedOutput("dead", windowed)

    def _abandon(self) -> None:
        self._ahead.abandon(read for read, _, _ in self._begun)
        self._begun.clear()

    def _read(self, read: Read) -> EncodedImage | DeadLetter:
        return read_image(read, self._settings.max_file_bytes, self._breaker)
