"""What a stream begins and ends with: images out of messages, and the messages, answers and rows of their results.

What stands between is one DoFn after the other, without flatten or shuffle, so that a local runner fuses it and acknowledges a
message only when its answers are published and its rows are durable.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import apache_beam as beam

from pipeline.records import DeadLetter, DetectedImage, EncodedImage, ImageRef, dead_letter_row, detection_row, row_bytes
from pipeline.storage.results import DEAD_LETTERS, DETECTIONS
from pipeline.stream.archive import ArchivedRow
from pipeline.stream.clients import Publishing
from pipeline.stream.dedup_cache import Repeat
from pipeline.stream.messages import Message, MessageLimits, parse_message
from pipeline.stream.outgoing import Outcome, OutgoingMessage, dead_letter_message, detection_message
from pipeline.stream.run import RunSettings, run_of


class Requested(NamedTuple):
    """The outputs of `ParseMessages`."""

    images: beam.PCollection[ImageRef | EncodedImage]
    dead: beam.PCollection[DeadLetter]


_BEFORE_DETECTING = ("message", "read")  # stages whose failures were never under way for a repeat to join


@dataclasses.dataclass
class ParseMessages(beam.PTransform):
    """Finds out what each message asks for.

    Element in: `Message`. Elements out: one `ImageRef` or `EncodedImage` an image, or a `DeadLetter`. Unbounded.

    Args:
      limits: What a message may ask for.
      run: The run whose figures and open requests are kept.
    """

    limits: MessageLimits
    run: RunSettings

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, messages: beam.PCollection[Message]) -> Requested:
        """Wires the parsing DoFn."""
        parsed = messages | "Parse" >> beam.ParDo(_Parse(self.limits, self.run)).with_outputs("dead", main="images")
        return Requested(parsed.images, parsed.dead)


@dataclasses.dataclass
class PublishResults(beam.PTransform):
    """Publishes the message of each result, and the answer of each request that it completes.

    Element in: `DetectedImage`, `DeadLetter`, or a `Repeat`. Nothing comes out. A bundle ends only when Pub/Sub
    has all of its messages.

    Args:
      run: The run whose topics they go to, and whose figures and open requests are kept.
    """

    run: RunSettings

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, results: beam.PCollection[Any]) -> beam.PCollection[None]:
        """Wires the publishing DoFn."""
        return results | "Publish" >> beam.ParDo(_PublishResults(self.run))


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


class _PublishResults(beam.DoFn):
    def __init__(self, run: RunSettings):
        self._run = run
        self._topics = run.topics

    def setup(self) -> None:
        self._shared = run_of(self._run)

    def start_bundle(self) -> None:
        self._publishing = Publishing()
        self._answers: list[OutgoingMessage] = []
        self._rows: list[ArchivedRow] = []

    def process(self, result: DetectedImage | DeadLetter | Repeat) -> None:
        if isinstance(result, Repeat):
            self._shared.figures.add_duplicate()
            if result.outcome:
                self._answer([result.ref], result.outcome)
            return
        now = time.time()
        outcome = self._publish(result, now)
        self._shared.figures.add_result(result, now)
        if self._shared.attempts:
            self._shared.attempts.end(result.ref, outcome.failed)
        begun = not (isinstance(result, DeadLetter) and result.stage in _BEFORE_DETECTING)
        others = self._shared.recent.done(result.ref, outcome) if begun else []
        self._answer([result.ref, *others], outcome)

    def finish_bundle(self) -> None:
        if self._shared.archive:
            self._shared.archive.spill(self._rows)
        self._publishing.wait()
        self._shared.answered(self._answers)

    def _publish(self, result: DetectedImage | DeadLetter, now: float) -> Outcome:
        if isinstance(result, DetectedImage):
            message = detection_message(result, now)
            self._publishing.send(self._topics.detections, message)
            if self._run.archive_detections:
                row = row_bytes(detection_row(result)) if message.is_cut else message.data
                self._rows.append(ArchivedRow(DETECTIONS, result.ref, row))
            return Outcome(message.data if self._topics.answers else b"", failed=False)
        if self._topics.dead_letters:
            self._publishing.send(self._topics.dead_letters, dead_letter_message(result, now))
        self._rows.append(ArchivedRow(DEAD_LETTERS, result.ref, row_bytes(dead_letter_row(result))))
        return Outcome(row_bytes(dead_letter_row(dataclasses.replace(result, payload=b""))), failed=True)

    def _answer(self, asking: Iterable[ImageRef], outcome: Outcome) -> None:
        """Publishes the answers that this outcome completes."""
        for ref in asking:
            for answer in self._shared.answers.done(ref, outcome) if self._shared.answers else ():
                self._publishing.send(self._topics.answers, answer)
                self._answers.append(answer)
