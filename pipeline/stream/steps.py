"""The first and last steps of a stream: `ParseMessages` makes images of messages, `PublishResults` publishes their results.

All steps between are DoFns in one line, without flatten or shuffle. A local runner therefore fuses them, and acknowledges a
message only after its results are published and its rows are durable; `pipeline.stream.run` draws the way of an acknowledgement.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import apache_beam as beam

from pipeline.records import DeadLetter, DetectedImage, EncodedImage, ImageRef, dead_letter_row, row_bytes
from pipeline.stream.archive import ArchivedRow
from pipeline.stream.clients import Publishing
from pipeline.stream.dedup_cache import Repeat
from pipeline.stream.messages import Message, MessageLimits, parse_message
from pipeline.stream.outgoing import Outcome, OutgoingMessage, dead_letter_message, detection_message
from pipeline.stream.run import RunSettings, StreamRun, run_of

_BEFORE_DETECTING = ("message", "read")  # stages before an image counts as under way, so no repeat waits for its outcome


@dataclasses.dataclass
class PublishResults(beam.PTransform):
    """Publishes the message of each result, and the answer of each request that it completes; see `publish_result`.

    Element in: `DetectedImage`, `DeadLetter`, or a `Repeat`. Nothing comes out. A bundle ends only when Pub/Sub has all of
    its messages; the archive then has its rows, and holds the messages that asked for them until these are durable.

    Args:
      run: The stream's settings: topics, archive.
    """

    run: RunSettings

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, results: beam.PCollection[Any]) -> beam.PCollection[None]:
        """Wires the publishing DoFn."""
        return results | "Publish" >> beam.ParDo(_PublishResults(self.run))


def publish_result(result: DetectedImage | DeadLetter | Repeat, run: StreamRun, bundle: PublishedBundle) -> None:
    """Publishes one result. Its row is serialised once, for the message, the archive and the answers.

    Args:
      result: What became of an image. A repeat is only counted, and completes answers if the first outcome is known.
      run: The state of the stream: statistics, deduplication, open requests.
      bundle: Takes the messages and the rows.
    """
    if isinstance(result, Repeat):
        run.figures.add_duplicate()
        if result.outcome:
            bundle.answer([result.ref], result.outcome)
        return
    now, is_dead = time.time(), isinstance(result, DeadLetter)
    message = dead_letter_message(result, now) if isinstance(result, DeadLetter) else detection_message(result, now)
    bundle.send(run.settings.topics.dead_letters if is_dead else run.settings.topics.detections, message)
    if is_dead or run.settings.archive_detections:
        bundle.rows.append(ArchivedRow(dataclasses.replace(result, thumbnail=b""), message.row))
    run.figures.add_result(result, now)
    outcome = Outcome(_answered_row(result, message) if run.answers else b"", is_dead)
    bundle.answer([result.ref, *run.end_attempt(result.ref, outcome, was_begun=_was_begun(result))], outcome)


class PublishedBundle:
    """The messages and rows of one bundle, until its end.

    Attributes:
      rows: Rows for the archive.
    """

    def __init__(self, run: StreamRun):
        self.rows: list[ArchivedRow] = []
        self._run = run
        self._publishing = Publishing()
        self._answers: list[OutgoingMessage] = []

    def send(self, topic: str, message: OutgoingMessage) -> None:
        """Begins to publish a message, if there is a topic for it."""
        if topic:
            self._publishing.send(topic, message)

    def answer(self, refs: Iterable[ImageRef], outcome: Outcome) -> None:
        """Begins to publish the answers that an outcome completes, for each message that asked for the image."""
        for ref in refs:
            for answer in self._run.answers.done(ref, outcome) if self._run.answers else ():
                self.send(self._run.settings.topics.answers, answer)
                self._answers.append(answer)

    def finish(self) -> None:
        """Waits until Pub/Sub has the messages; then hands the rows to the archive, which holds what asked for them."""
        self._publishing.wait()
        if self._run.archive:
            self._run.archive.add(self.rows)
        self._run.answered(self._answers)


class _PublishResults(beam.DoFn):
    def __init__(self, run: RunSettings):
        self._run = run

    def setup(self) -> None:
        self._shared = run_of(self._run)

    def start_bundle(self) -> None:
        self._bundle = PublishedBundle(self._shared)

    def process(self, result: DetectedImage | DeadLetter | Repeat) -> None:
        publish_result(result, self._shared, self._bundle)

    def finish_bundle(self) -> None:
        self._bundle.finish()


def _was_begun(result: DetectedImage | DeadLetter) -> bool:
    return not (isinstance(result, DeadLetter) and result.stage in _BEFORE_DETECTING)


def _answered_row(result: DetectedImage | DeadLetter, message: OutgoingMessage) -> bytes:
    """The row as an answer has it: without the payload of a dead letter."""
    if isinstance(result, DetectedImage):
        return message.data
    return row_bytes(dead_letter_row(dataclasses.replace(result, payload=b""))) if result.payload else message.row


class Requested(NamedTuple):
    """The outputs of `ParseMessages`."""

    images: beam.PCollection[ImageRef | EncodedImage]
    dead: beam.PCollection[DeadLetter]


@dataclasses.dataclass
class ParseMessages(beam.PTransform):
    """Parses messages into images; see `pipeline.stream.messages.parse_message`.

    Element in: `Message`. Elements out: one `ImageRef` or `EncodedImage` an image, or a `DeadLetter`. Unbounded.

    Args:
      limits: What a message may ask for.
      run: The stream whose statistics and open requests are kept.
    """

    limits: MessageLimits
    run: RunSettings

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, messages: beam.PCollection[Message]) -> Requested:
        """Wires the parsing DoFn."""
        parsed = messages | "Parse" >> beam.ParDo(_Parse(self.limits, self.run)).with_outputs("dead", main="images")
        return Requested(parsed.images, parsed.dead)


class _Parse(beam.DoFn):
    def __init__(self, limits: MessageLimits, run: RunSettings):
        self._limits = limits
        self._run = run

    def setup(self) -> None:
        self._shared = run_of(self._run)

    def process(self, message: Message) -> Iterator[Any]:
        request = parse_message(message, self._limits)
        self._shared.figures.add_request(request, message.publish_time)
        self._shared.open_request(request)
        yield from request.images
        yield from (beam.pvalue.TaggedOutput("dead", letter) for letter in request.dead_letters)
