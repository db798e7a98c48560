"""The first and the last step of a stream: `ParseMessages` makes images of messages, `PublishResults` publishes results."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import apache_beam as beam
from apache_beam.utils.windowed_value import WindowedValue
from msgspec.structs import replace

from pipeline.listing.containers import archive_of
from pipeline.listing.list_images import by_content
from pipeline.listing.names import is_container, names_image
from pipeline.records import DeadLetter, DetectedImage, Image, ImageRef, compact_bytes, dead_letter_row
from pipeline.results.layout import kind_of_rows, own_files
from pipeline.stats import beam_metrics
from pipeline.storage.store import FoundFile
from pipeline.stream.clients import Publishing
from pipeline.stream.members import members_of
from pipeline.stream.messages import Message, Request, is_notification, parse_message
from pipeline.stream.outgoing import dead_letter_message, detection_message
from pipeline.stream.shared import RunSettings, StreamStep

_RETRY_SECONDS = 3.0  # of a look at an object; an outage is for the reading to wait for


class ParseMessages(StreamStep):
    """Parses messages into images, and opens the containers that they name; see `parse_message` and `members_of`.

    Element in: `Message`. Elements out: one `ImageRef` or `EncodedImage` an image, or a `DeadLetter` as output `dead`. Unbounded.
    As in batch, an object of which Cloud Storage notifies is skipped if this program wrote it, or if it is no image by its name
    and its first bytes, which are read at the end of the bundle, side by side.

    Args:
      allowed: The folders whose images a message may name.
      run: The stream whose open requests are kept.
    """

    def __init__(self, allowed: Sequence[str], run: RunSettings):
        super().__init__(run)
        self._allowed = allowed

    def setup(self) -> None:
        super().setup()
        self._own = own_files(self._run.results, ())

    def start_bundle(self) -> None:
        self._unknown: list[WindowedValue] = []

    def process(
        self, message: Message, timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[Any]:
        request = parse_message(message, self._allowed)
        beam_metrics.note_message(message.publish_time)
        if is_notification(message) and (named := request.named):
            if self._is_own(named.uri):
                request = _skipped(request)
            elif not names_image(named.uri):
                self._unknown.append(WindowedValue(request, timestamp, [window]))
                return
        yield from self._asked_for(request)

    def finish_bundle(self) -> Iterator[WindowedValue]:
        if not self._unknown:
            return
        with ThreadPoolExecutor(self._run.config.read.threads_of(1), "look at") as pool:
            begins_like_one = pool.map(_begins_like_an_image, [asked.value for asked in self._unknown])
            for asked, is_image in zip(self._unknown, begins_like_one, strict=True):
                for found in self._asked_for(asked.value if is_image else _skipped(asked.value)):
                    is_dead = isinstance(found, beam.pvalue.TaggedOutput)
                    value = asked.with_value(found.value if is_dead else found)
                    yield beam.pvalue.TaggedOutput(found.tag, value) if is_dead else value

    def _is_own(self, uri: str) -> bool:
        with contextlib.suppress(Exception):  # a folder that cannot be listed now may hold images: their readers wait for it
            return bool(kind_of_rows(uri)) or self._own(uri)
        return False

    def _asked_for(self, request: Request) -> Iterator[Any]:
        """The images of a request, those of containers, too, and dead letters; `Answers` knows of each before it leaves."""
        images, containers = list[Image](), defaultdict[str, list[ImageRef]](list)
        for image in request.images:
            if isinstance(image, ImageRef) and is_container(image.uri):
                containers[archive_of(image.uri) or image.uri].append(image)
            else:
                images.append(image)
        beam_metrics.count_read(len(images) + len(request.dead_letters) + int(request.skipped))
        if request.skipped:
            beam_metrics.count_skipped()
        if request.dead_letters:
            beam_metrics.count_results(*request.dead_letters)
        self._shared.answers.open(request)
        yield from images
        for of_container in containers.values():
            yield from self._members(of_container)
        yield from (beam.pvalue.TaggedOutput("dead", letter) for letter in request.dead_letters)

    def _members(self, named: Sequence[ImageRef]) -> Iterator[Any]:
        for member in members_of(named[0], self._run.config, self._shared.threads.stop, named[1:]):
            beam_metrics.count_read()
            if isinstance(member, str):
                beam_metrics.count_skipped()
                continue
            self._shared.answers.expect(member.ref)
            if isinstance(member, DeadLetter):
                beam_metrics.count_results(member)
                yield beam.pvalue.TaggedOutput("dead", member)
            else:
                yield member
        for container in named:
            self._shared.answers.opened(container)


def _skipped(request: Request) -> Request:
    return dataclasses.replace(request, images=(), dead_letters=(), skipped=True)


def _begins_like_an_image(request: Request) -> bool:
    """Whether the one object of a notification does; one that cannot be read is left to its reader, which waits, or says why."""
    ref = request.named
    return ref is None or not isinstance(by_content(FoundFile(ref.location), _RETRY_SECONDS), str)


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
            row = compact_bytes(dead_letter_row(replace(result, payload=b"")))
        else:
            message, topic = detection_message(result, now), config.output
            row = message.data
            beam_metrics.note_published(result, now)
        if topic:
            self._publishing.send(topic, message)
        self._shared.end(result, row)
        if self._shared.archive and (isinstance(result, DeadLetter) or config.stream.archive):
            self._records.append(replace(result, thumbnail=b""))

    def finish_bundle(self) -> None:
        self._publishing.wait()
        if self._shared.archive:
            self._shared.archive.add(self._records)
