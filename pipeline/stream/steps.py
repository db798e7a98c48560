"""The steps that only a stream has: `ParseMessages` makes images of messages, `ReadRequested` reads them, `PublishResults` ends.

All steps between are DoFns in one line, without flatten or shuffle. A local runner therefore fuses them, and acknowledges a
message only after its results are published and its rows are durable; `pipeline.stream.run` draws the way of an acknowledgement.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from typing import Any, TypeGuard

import apache_beam as beam

from pipeline.prefetch import Slot
from pipeline.read.fetch import RETRY_SECONDS, StorageUnavailableError
from pipeline.read.read_ahead import ReadAhead
from pipeline.read.read_image import CircuitBreaker
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, ImageRef, dead_letter_row, row_bytes
from pipeline.storage.web import is_web
from pipeline.stream.clients import Publishing
from pipeline.stream.messages import Message, MessageLimits, parse_message
from pipeline.stream.outgoing import Outcome, dead_letter_message, detection_message
from pipeline.stream.run import RunSettings, StreamStep, run_of

_AGAIN_SECONDS = 5.0


class ParseMessages(StreamStep):
    """Parses messages into images; see `pipeline.stream.messages.parse_message`.

    Element in: `Message`. Elements out: one `ImageRef` or `EncodedImage` an image, or a `DeadLetter` as output `dead`. Unbounded.

    Args:
      limits: What a message may ask for.
      run: The stream whose statistics and open requests are kept.
    """

    def __init__(self, limits: MessageLimits, run: RunSettings):
        super().__init__(run)
        self._limits = limits

    def process(self, message: Message) -> Iterator[Any]:
        request = parse_message(message, self._limits)
        self._shared.live_stats.add_request(request, message.publish_time)
        if self._shared.answers:
            self._shared.answers.open(request)
        yield from request.images
        yield from (beam.pvalue.TaggedOutput("dead", letter) for letter in request.dead_letters)


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
            if not _is_unavailable(read) or slot.abandoned or self._stop.is_set() or is_web(ref.uri):
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


class PublishResults(StreamStep):
    """Publishes one message for each result, and counts it.

    Element in: `DetectedImage` or `DeadLetter`. Nothing comes out. A bundle ends only when Pub/Sub has all of its messages; the
    archive then has its rows, and holds the messages that asked for them until these are durable. An image that was not read
    when the run was stopped has no outcome: its message is held, and delivered again after the run.
    """

    def start_bundle(self) -> None:
        self._publishing = Publishing()
        self._records: list[DetectedImage | DeadLetter] = []

    def process(self, result: DetectedImage | DeadLetter) -> None:
        run, stream, now = self._shared, self._run.config.stream, time.time()
        if _is_unavailable(result) and run.threads.stop.is_set():
            run.live_stats.add_unread()
            run.subscriber.hold([result.ref.message_id])
            return
        is_dead = isinstance(result, DeadLetter)
        if isinstance(result, DeadLetter):
            message, topic = dead_letter_message(result, now), stream.dead_letter_topic
        else:
            message, topic = detection_message(result, now), self._run.config.output
        if topic:
            self._publishing.send(topic, message)
        run.live_stats.add_result(result, now)
        run.end(result, Outcome(self._answered(result, message.data), is_dead))
        if run.archive and (is_dead or stream.archive):
            self._records.append(dataclasses.replace(result, thumbnail=b""))

    def finish_bundle(self) -> None:
        self._publishing.wait()
        if self._shared.archive:
            self._shared.archive.add(self._records)

    def _answered(self, result: DetectedImage | DeadLetter, row: bytes) -> bytes:
        """The row in the answer to a request, without the payload of a dead letter."""
        if not self._shared.answers:
            return b""
        return row_bytes(dead_letter_row(dataclasses.replace(result, payload=b""))) if isinstance(result, DeadLetter) else row


def _is_unavailable(result: EncodedImage | DetectedImage | DeadLetter) -> TypeGuard[DeadLetter]:
    """Whether an image was not read because its store did not answer."""
    return isinstance(result, DeadLetter) and (result.stage, result.reason) == ("read", "storage_unavailable")
