"""The steps that only a stream has: `ParseMessages` makes images of messages, `ReadRequested` reads them, `PublishResults` ends.

All steps between are DoFns in one line, without flatten or shuffle. A local runner therefore fuses them, and acknowledges a
message only after its results are published and its rows are durable; `pipeline.stream.run` draws the way of an acknowledgement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import apache_beam as beam
from msgspec.structs import replace

from pipeline.read.fetch import RETRY_SECONDS, StorageUnavailableError
from pipeline.read.prefetch import Read
from pipeline.read.read_ahead import ReadAhead
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, dead_letter_row, row_bytes
from pipeline.stats import metrics
from pipeline.storage.web import is_web
from pipeline.stream.clients import Publishing
from pipeline.stream.messages import Message, parse_message
from pipeline.stream.outgoing import dead_letter_message, detection_message
from pipeline.stream.run import RunSettings, StreamStep, run_of

_AGAIN_SECONDS = 5.0


class ParseMessages(StreamStep):
    """Parses messages into images; see `pipeline.stream.messages.parse_message`.

    Element in: `Message`. Elements out: one `ImageRef` or `EncodedImage` an image, or a `DeadLetter` as output `dead`. Unbounded.

    Args:
      allowed: The folders whose images a message may name.
      run: The stream whose open requests are kept.
    """

    def __init__(self, allowed: Sequence[str], run: RunSettings):
        super().__init__(run)
        self._allowed = allowed

    def process(self, message: Message) -> Iterator[Any]:
        request = parse_message(message, self._allowed)
        metrics.note_message(message.publish_time)
        metrics.count_read(max(len(request.images) + len(request.dead_letters), 1))
        metrics.count_skipped(int(request.skipped))
        metrics.count_results(*request.dead_letters)
        self._shared.answers.open(request)
        yield from request.images
        yield from (beam.pvalue.TaggedOutput("dead", letter) for letter in request.dead_letters)


class ReadRequested(ReadAhead):
    """Reads the images that messages name; those that came with their bytes pass.

    Element in: `ImageRef` or `EncodedImage`. Elements out: `EncodedImage`, or `DeadLetter` as output `dead`. Unbounded. An image
    is retried for a minute. While its store answers nobody, it waits, and so does the subscriber; no image waits for a web
    server, which anybody may name. If the run is stopped meanwhile, the images that wait are skipped; their messages are held,
    and delivered again after the run.

    Args:
      run: The run whose stop ends the waiting.
      retry_seconds: How long an image is retried while its store answers others.
    """

    def __init__(self, run: RunSettings, retry_seconds: float = RETRY_SECONDS):
        super().__init__(run.config.read, retry_seconds, give_up_seconds=math.inf)
        self._run = run

    def setup(self) -> None:
        super().setup()
        self._shared = run_of(self._run)
        self._stop = self._breaker.stop = self._shared.threads.stop

    def _read(self, read: Read) -> EncodedImage | DeadLetter:
        began = time.monotonic()
        while True:
            found = super()._read(read)
            if not _is_unavailable(found) or read.abandoned or self._stop.is_set() or is_web(read.ref.uri):
                return found
            was_retried = time.monotonic() + _AGAIN_SECONDS >= began + self._retry_seconds
            if was_retried and self._breaker.has_answered(read.ref.uri, since=began):
                return found
            # also for missing credentials, which a single read does not retry
            self._breaker.failed(read.ref.uri, StorageUnavailableError(found.message))
            self._stop.wait(_AGAIN_SECONDS)

    def _outputs(self, read: Read, timestamp: Any, window: Any) -> Iterator[Any]:
        if _is_unavailable(read.result.result()) and self._stop.is_set():
            metrics.count_skipped()
            self._shared.subscriber.hold([read.ref.message_id])
        else:
            yield from super()._outputs(read, timestamp, window)


class PublishResults(StreamStep):
    """Publishes one message for each result.

    Element in: `DetectedImage` or `DeadLetter`. Nothing comes out. A bundle ends only when Pub/Sub has all of its messages; the
    archive then has its rows, and holds the messages that asked for them until these are durable.
    """

    def start_bundle(self) -> None:
        self._publishing = Publishing()
        self._records: list[DetectedImage | DeadLetter] = []

    def process(self, result: DetectedImage | DeadLetter) -> None:
        config, now = self._run.config, time.time()
        if isinstance(result, DeadLetter):
            message, topic = dead_letter_message(result, now), config.stream.dead_letter_topic
            row = row_bytes(dead_letter_row(replace(result, payload=b"")))
        else:
            message, topic = detection_message(result, now), config.output
            row = message.data
            metrics.note_published(result, now)
        if topic:
            self._publishing.send(topic, message)
        self._shared.end(result, row)
        if self._shared.archive and (isinstance(result, DeadLetter) or config.stream.archive):
            self._records.append(replace(result, thumbnail=b""))

    def finish_bundle(self) -> None:
        self._publishing.wait()
        if self._shared.archive:
            self._shared.archive.add(self._records)


def _is_unavailable(read: EncodedImage | DeadLetter) -> TypeGuard[DeadLetter]:
    """Whether an image was not read because its store did not answer."""
    return isinstance(read, DeadLetter) and (read.stage, read.reason) == ("read", "storage_unavailable")
