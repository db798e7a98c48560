"""The steps that only a stream has: requests out of messages before `DetectObjects`, answers and archive files behind it.

What stands between reading and publishing is one DoFn after the other, without flatten or shuffle, so that a local runner fuses
it and acknowledges a message only when its answers are published. The archive hangs off behind a shuffle.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard

import apache_beam as beam
from apache_beam.transforms.window import FixedWindows, TimestampedValue

from pipeline.config import ReadConfig
from pipeline.look_ahead import Place
from pipeline.read.fetch import StorageUnavailableError
from pipeline.read.patience import Patience
from pipeline.read.read_ahead import ReadAhead
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, ImageRef, dead_letter_row, row_bytes
from pipeline.storage.files import write_file
from pipeline.storage.results import archive_name, shard_of
from pipeline.storage.staging import staging_of
from pipeline.stream.clients import Publishing
from pipeline.stream.messages import Message, MessageLimits, parse_message
from pipeline.stream.outgoing import Outcome, OutgoingMessage, dead_letter_message, detection_message
from pipeline.stream.remembered import Repeat
from pipeline.stream.run import RunSettings, run_of


class Requested(NamedTuple):
    """The outputs of `ParseMessages`."""

    images: beam.PCollection[ImageRef | EncodedImage]
    dead: beam.PCollection[DeadLetter]


class ReadOrDead(NamedTuple):
    """The outputs of `ReadRequested`."""

    images: beam.PCollection[EncodedImage]
    dead: beam.PCollection[DeadLetter]


_AGAIN_SECONDS = 5.0
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
class ReadRequested(beam.PTransform):
    """Reads the images that messages name; those that came with their bytes pass.

    Element in: `ImageRef` or `EncodedImage`. Elements out: `EncodedImage` or `DeadLetter`. Unbounded. While storage does not
    answer, its images wait, and so does intake. Where the run is stopped meanwhile they have no outcome: their messages are not
    acknowledged, and come again.

    Args:
      read: How to read.
      run: The run whose stop ends the waiting.
    """

    read: ReadConfig
    run: RunSettings

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, requested: beam.PCollection[ImageRef | EncodedImage]) -> ReadOrDead:
        """Wires the reading DoFn of batch, with more patience, and what becomes of images that it was stopped at."""
        read = requested | "ReadAhead" >> beam.ParDo(_ReadPatiently(self.read, self.run)).with_outputs("dead", main="images")
        return ReadOrDead(read.images, read.dead | "GiveBack" >> beam.ParDo(_GiveBack(self.run)))


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


@dataclasses.dataclass
class ArchiveRows(beam.PTransform):
    """Writes rows as `<folder>/<kind>/<kind>-<window>-<job>-00000-of-0000N.jsonl`, one set of files a window, sorted by image.

    Element in: any record with a `ref`; element out: the names of the files. Unbounded. A file appears complete or not at all,
    and a retried bundle writes the same file again. Windows are of the time at which a row is made, so none comes late. A local
    runner holds an open window's rows in memory: a crash loses them here (they are published all the same).

    Args:
      folder: Local or `gs://`.
      kind: `detections` or `dead_letters`.
      to_row: Record -> JSON-able row.
      window_s: Length of a window.
      job: Part of the names, so that a restarted job overwrites nothing.
      shards: Files a window.
    """

    folder: str
    kind: str
    to_row: Callable[[Any], dict[str, Any]]
    window_s: float
    job: str
    shards: int = 1

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, records: beam.PCollection[Any] | tuple[beam.PCollection[Any], ...]) -> beam.PCollection[str]:
        """Wires rows, windows, grouping by shard, and writing."""
        parts = records if isinstance(records, tuple) else (records,)
        lines = tuple(
            part | f"ToLines{n}" >> beam.Map(self._to_line).with_output_types(tuple[int, bytes]) for n, part in enumerate(parts)
        )
        return (
            (lines[0] if len(lines) == 1 else lines | "FlattenLines" >> beam.Flatten())
            | "Window" >> beam.WindowInto(FixedWindows(self.window_s))
            | "GatherWindow" >> beam.GroupByKey()
            | "WriteWindow" >> beam.Map(self._write)
        )

    def _to_line(self, record: Any) -> TimestampedValue:
        line = row_bytes(self.to_row(record)) + b"\n"
        return TimestampedValue((shard_of(record.ref, self.shards), line), time.time())

    def _write(self, shard_and_lines: tuple[int, Iterable[bytes]], window: Any = beam.DoFn.WindowParam) -> str:
        shard, lines = shard_and_lines
        start = datetime.datetime.fromtimestamp(float(window.start), datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        path = f"{self.folder}/{archive_name(self.kind, start, self.job, shard, self.shards)}"
        write_file(path, b"".join(sorted(lines)), staging_of(self.folder, self.job))
        return path


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


class _ReadPatiently(ReadAhead):
    def __init__(self, read: ReadConfig, run: RunSettings):
        super().__init__(read)
        self._run = run

    def setup(self) -> None:
        super().setup()
        self._stop = run_of(self._run).threads.stop
        self._patience = self._waiting = _PatienceUntilStopped(self._stop)

    def _read_one(self, ref: ImageRef, place: Place[ImageRef, EncodedImage | DeadLetter]) -> EncodedImage | DeadLetter:
        while True:
            read = super()._read_one(ref, place)
            if not _is_unavailable(read) or place.abandoned or self._stop.is_set():
                return read
            self._waiting.note(read)  # for want of credentials, which is no failure that a single read would wait for
            self._stop.wait(_AGAIN_SECONDS)


class _PatienceUntilStopped(Patience):
    """Waits for storage as long as the run goes on."""

    def __init__(self, stop: threading.Event):
        super().__init__(retry_seconds=math.inf, give_up_seconds=math.inf)
        self._stop = stop

    def failed(self, err: Exception) -> None:
        super().failed(err)
        if self._stop.is_set():
            raise err

    def note(self, unread: DeadLetter) -> None:
        """Notes an image that could not be read for now."""
        super().failed(StorageUnavailableError(unread.message))


class _GiveBack(beam.DoFn):
    """Takes out what is no failure of an image, but was not read when the run was stopped."""

    def __init__(self, run: RunSettings):
        self._run = run

    def setup(self) -> None:
        self._shared = run_of(self._run)

    def process(self, letter: DeadLetter) -> Iterator[DeadLetter]:
        if _is_unavailable(letter) and self._shared.threads.stop.is_set():
            self._shared.give_back(letter.ref)
        else:
            yield letter


def _is_unavailable(read: EncodedImage | DeadLetter) -> TypeGuard[DeadLetter]:
    return isinstance(read, DeadLetter) and (read.stage, read.reason) == ("read", "storage_unavailable")


class _PublishResults(beam.DoFn):
    def __init__(self, run: RunSettings):
        self._run = run
        self._topics = run.topics

    def setup(self) -> None:
        self._shared = run_of(self._run)

    def start_bundle(self) -> None:
        self._publishing = Publishing()
        self._answers: list[OutgoingMessage] = []

    def process(self, result: DetectedImage | DeadLetter | Repeat) -> None:
        if isinstance(result, Repeat):
            self._shared.figures.add_duplicate()
            if result.outcome:
                self._answer([result.ref], result.outcome)
            return
        now = time.time()
        outcome = self._publish(result, now)
        self._shared.figures.add_result(result, now)
        begun = not (isinstance(result, DeadLetter) and result.stage in _BEFORE_DETECTING)
        others = self._shared.recent.done(result.ref, outcome) if begun else []
        self._answer([result.ref, *others], outcome)

    def finish_bundle(self) -> None:
        self._publishing.wait()
        self._shared.answered(self._answers)

    def _publish(self, result: DetectedImage | DeadLetter, now: float) -> Outcome:
        if isinstance(result, DetectedImage):
            message = detection_message(result, now)
            self._publishing.send(self._topics.detections, message)
            return Outcome(message.data if self._topics.answers else b"", failed=False)
        if self._topics.dead_letters:
            self._publishing.send(self._topics.dead_letters, dead_letter_message(result, now))
        return Outcome(row_bytes(dead_letter_row(dataclasses.replace(result, payload=b""))), failed=True)

    def _answer(self, asking: Iterable[ImageRef], outcome: Outcome) -> None:
        """Publishes the answers that this outcome completes."""
        for ref in asking:
            for answer in self._shared.answers.done(ref, outcome) if self._shared.answers else ():
                self._publishing.send(self._topics.answers, answer)
                self._answers.append(answer)
