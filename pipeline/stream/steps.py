"""The first and last steps of a stream: `ParseMessages` makes images of messages, `PublishResults` publishes their results.

All steps between are DoFns in one line, without flatten or shuffle. A local runner therefore fuses them, and acknowledges a
message only after its results are published and its rows are durable; `pipeline.stream.run` draws the way of an acknowledgement.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import apache_beam as beam

from pipeline.records import DeadLetter, DetectedImage, dead_letter_row, row_bytes
from pipeline.stream.clients import Publishing
from pipeline.stream.messages import Message, MessageLimits, parse_message
from pipeline.stream.outgoing import Outcome, dead_letter_message, detection_message
from pipeline.stream.read_requested import is_unavailable
from pipeline.stream.run import RunSettings, StreamRun, StreamStep


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


class PublishResults(StreamStep):
    """Publishes the message of each result; see `publish_result`.

    Element in: `DetectedImage` or `DeadLetter`. Nothing comes out. A bundle ends only when Pub/Sub has all of its messages; the
    archive then has its rows, and holds the messages that asked for them until these are durable.
    """

    def start_bundle(self) -> None:
        self._publishing = Publishing()
        self._records: list[DetectedImage | DeadLetter] = []

    def process(self, result: DetectedImage | DeadLetter) -> None:
        if is_unavailable(result) and self._shared.threads.stop.is_set():
            self._shared.leave(result.ref)
            return
        publish_result(result, self._shared, self._publishing)
        if self._shared.archive and (isinstance(result, DeadLetter) or self._run.config.stream.archive):
            self._records.append(dataclasses.replace(result, thumbnail=b""))

    def finish_bundle(self) -> None:
        self._publishing.wait()
        if self._shared.archive:
            self._shared.archive.add(self._records)


def publish_result(result: DetectedImage | DeadLetter, run: StreamRun, publishing: Publishing) -> None:
    """Begins to publish one result, and counts it.

    Args:
      result: What became of an image.
      run: The state of the stream: statistics, deduplication, open requests.
      publishing: Publishes the bundle's messages.
    """
    now, config = time.time(), run.settings.config
    if isinstance(result, DeadLetter):
        message, topic = dead_letter_message(result, now), config.stream.dead_letter_topic
        without_payload = dataclasses.replace(result, payload=b"")
        answered = row_bytes(dead_letter_row(without_payload)) if run.answers else b""
    else:
        message, topic = detection_message(result, now), config.output
        answered = message.data if run.answers else b""
    if topic:
        publishing.send(topic, message)
    run.live_stats.add_result(result, now)
    run.end(result, Outcome(answered, isinstance(result, DeadLetter)))
