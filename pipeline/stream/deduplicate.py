"""One result for each generation of an image within a time: duplicates are found in memory, or in the runner's state."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol

import apache_beam as beam
from apache_beam.coders import BooleanCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec, TimerSpec, on_timer
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue
from msgspec.structs import replace

from pipeline.process import PROCESS
from pipeline.records import Image, ImageRef, name_bytes, ref_of
from pipeline.stats import beam_metrics
from pipeline.storage.store import FoundFile
from pipeline.stream.shared import RunSettings, StreamStep

_RETRY_SECONDS = 3.0  # an outage is for the reading to wait for, and to report
_LOOK_SECONDS = 0.5  # how soon a wait for a store notices that the stream is stopped


class LooksUp(Protocol):
    """A detector, or its feeder."""

    def look_up(self, locations: Sequence[str], seconds: float) -> list[Future[list[FoundFile | None]]]:
        """Begins to look up files; see `Feeder.look_up`."""


@beam.typehints.with_output_types(tuple[bytes, Image])
class AddIdentity(StreamStep):
    """Adds the identity to each image, in bytes; feeder processes look up missing generations at the end of the bundle.

    Element in: `ImageRef`, or `EncodedImage` if the image came with its message; out: the same with its identity, and with its
    size where that was looked up. It gets no generation: if it is replaced meanwhile, the newest is read. An image that cannot be
    looked up is a repeat of its own message only, and reading it waits, or fails.

    Args:
      run: The stream.
      detector: The process's detector, or its feeder.
    """

    def __init__(self, run: RunSettings, detector: Callable[[], LooksUp]):
        super().__init__(run)
        self._detector = detector

    def start_bundle(self) -> None:
        self._asked: list[WindowedValue] = []

    def process(
        self, image: Image, timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[tuple[bytes, Image]]:
        if ref_of(image).generation:
            yield name_bytes(ref_of(image).identity), image
        else:
            self._asked.append(WindowedValue(image, timestamp, [window]))

    def finish_bundle(self) -> Iterator[WindowedValue]:
        if not self._asked:
            return
        with PROCESS.parts["read"].working():
            found = self._found([asked.value.location for asked in self._asked])
        for asked, file in zip(self._asked, found, strict=True):
            yield asked.with_value(_named(asked.value, file))

    def _found(self, locations: Sequence[str]) -> Iterable[FoundFile | None]:
        """The files, as far as they can be looked up before the stream is stopped."""
        stop = self._shared.threads.stop
        asked = [] if stop.is_set() else self._detector().look_up(locations, _RETRY_SECONDS)
        while wait(asked, _LOOK_SECONDS).not_done and not stop.is_set():
            pass
        if not asked or not all(part.done() for part in asked):
            return [None] * len(locations)
        return [file for part in asked for file in part.result()]


def _named(ref: ImageRef, file: FoundFile | None) -> tuple[bytes, ImageRef]:
    if file:
        return name_bytes(replace(ref, generation=file.generation).identity), replace(ref, size_bytes=file.size_bytes)
    return name_bytes(f"{ref.identity}#{ref.message_id or uuid.uuid4().hex}"), ref


class DropDuplicates(StreamStep):
    """Passes an image unless it is in progress or has a recent result; the others are counted, and get that result.

    Element in: an image with its identity; out: the image. Bounded or unbounded. The cache is in the process: a restart forgets
    it. A failed bundle must end the process (as on local runners), or its images would stay in progress.
    """

    def process(self, identity_and_image: tuple[bytes, Image]) -> Iterator[Image]:
        identity, image = identity_and_image
        if self._shared.recent.is_new(ref_of(image), identity):
            yield image
        else:
            beam_metrics.count_skipped()


@beam.typehints.with_output_types(Image)
class DropDuplicatesInState(StreamStep):
    """Drops and counts duplicates before images are read, by durable runner state.

    Element in: an image with its identity, by which they are shuffled; out: the image. An image that failed passes again if its
    last attempt was in this process. Beam's `DeduplicatePerKey` neither counts what it drops nor lets failed images pass.
    """

    _SEEN = ReadModifyWriteStateSpec("seen", BooleanCoder())
    _FORGET = TimerSpec("forget", TimeDomain.REAL_TIME)

    def process(
        self,
        identity_and_image: tuple[bytes, Image],
        seen: Any = beam.DoFn.StateParam(_SEEN),  # noqa: B008  how Beam's parameters are declared
        forget: Any = beam.DoFn.TimerParam(_FORGET),  # noqa: B008
    ) -> Iterator[Any]:
        _, image = identity_and_image
        if seen.read() and not self._shared.forget_failure(ref_of(image)):
            beam_metrics.count_skipped()
            return
        seen.write(True)
        forget.set(Timestamp.now() + self._run.config.stream.deduplicate_s)
        yield image

    @on_timer(_FORGET)
    def forget(self, seen: Any = beam.DoFn.StateParam(_SEEN)) -> None:  # noqa: B008
        seen.clear()
