"""The first and the last step of a stream: `ParseMessages` makes images of messages, `PublishResults` publishes results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
from msgspec.structs import replace

from pipeline.records import DeadLetter, DetectedImage, dead_letter_row, row_bytes
from pipeline.stats import metrics
from pipeline.stream.clients import Publishing
from pipeline.stream.messages import Message, parse_message
from pipeline.stream.outgoing import dead_letter_message, detection_message
from pipeline.stream.run import RunSettings, StreamStep


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


class PublishResults(StreamStep):
    """Publishes one message for each result; holds the message of an image that was skipped, so it comes again after the run.

    Element in: `DetectedImage` or `DeadLetter`. Nothing comes out. A bundle ends only when Pub/Sub has all of its messages; the
    archive then has its rows, and holds the messages that asked for them until these are durable.
    """

    def start_bundle(self) -> None:
        self._publishing = Publishing()
        self._records: list[DetectedImage | DeadLetter] = []

    def process(self, result: DetectedImage | DeadLetter) -> None:
        config, now = self._run.config, time.time()
        if isinstance(result, DeadLetter) and result.skipped:
            self._shared.subscriber.hold([result.ref.message_id])
            return
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
