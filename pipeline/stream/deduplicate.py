"""`DropDuplicates`: deduplication of images by identity, within a time: in memory, or in runner state."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.coders import StrUtf8Coder, TupleCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec, TimerSpec, on_timer
from apache_beam.utils.timestamp import Duration
from apache_beam.utils.windowed_value import WindowedValue

from pipeline.failures import ImageError
from pipeline.prefetch import started_pool
from pipeline.read.fetch import look_up
from pipeline.records import EncodedImage, ImageRef
from pipeline.stream.dedup_cache import Repeat
from pipeline.stream.run import RunSettings, run_of


class NewAndRepeats(NamedTuple):
    """The outputs of `DropDuplicates`."""

    new: beam.PCollection[EncodedImage]
    repeats: beam.PCollection[Repeat]


@dataclasses.dataclass
class DropDuplicates(beam.PTransform):
    """Passes an image unless it is in progress or has a recent result; the others are the output `repeats`.

    Element in: `EncodedImage`; out: `EncodedImage` or `Repeat`. Bounded or unbounded. The cache is in the process: a restart
    forgets it. A failed bundle must end the process (as on local runners), or its images would stay in progress.

    Args:
      run: The stream's settings; its `StreamRun` has the cache.
    """

    run: RunSettings

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, images: beam.PCollection[EncodedImage]) -> NewAndRepeats:
        """Wires one DoFn, without a shuffle, so that acknowledgements still wait for answers."""
        parted = images | "Remember" >> beam.ParDo(_Remember(self.run)).with_outputs("repeats", main="images")
        return NewAndRepeats(parted.images, parted.repeats)


@dataclasses.dataclass
class DropDuplicatesInState(beam.PTransform):
    """Deduplicates before images are read, in durable runner state; repeats are counted and dropped.

    Element in and out: `ImageRef`, or `EncodedImage` if the image came with its message; they are shuffled. State holds the
    process and message of the last attempt at each identity, and the messages of its repeats (`Attempts`). After a failed attempt
    in the same process the next request passes. If a worker has several processes, a request may pass although the image has a
    result. If detection is in another process than this step, a request may be dropped although the image failed there.

    Args:
      run: The stream's settings. Its `deduplicate_s` is in event time; processing-time timers would delay the archive's windows.
      threads: How many generations are looked up side by side, for messages that name none.
    """

    run: RunSettings
    threads: int = 8

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, asked: beam.PCollection[ImageRef | EncodedImage]) -> beam.PCollection[ImageRef | EncodedImage]:
        """Wires the identity, the state over it, and the way back."""
        return (
            asked
            | "ByIdentity" >> beam.ParDo(_Identify(self.threads)).with_output_types(tuple[str, ImageRef | EncodedImage])
            | "Deduplicate" >> beam.ParDo(_RememberInState(self.run)).with_output_types(ImageRef | EncodedImage)
        )


class _Remember(beam.DoFn):
    def __init__(self, run: RunSettings):
        self._run = run

    def setup(self) -> None:
        self._recent = run_of(self._run).recent

    def process(self, image: EncodedImage) -> Iterator[Any]:
        repeat = self._recent.ask(image.ref)
        yield beam.pvalue.TaggedOutput("repeats", repeat) if repeat else image


class _Identify(beam.DoFn):
    """Adds the identity to each image; looks up missing generations, those of a bundle side by side."""

    def __init__(self, threads: int):
        self._threads = threads

    def setup(self) -> None:
        self._pool = started_pool(self._threads, "look up")

    def teardown(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start_bundle(self) -> None:
        self._asked: list[tuple[Future[str], Any, Any, Any]] = []

    def process(
        self,
        image: ImageRef | EncodedImage,
        timestamp: Any = beam.DoFn.TimestampParam,
        window: Any = beam.DoFn.WindowParam,
    ) -> Iterator[Any]:
        ref = _ref_of(image)
        if ref.generation:
            yield ref.identity, image
        else:
            self._asked.append((self._pool.submit(_identity_now, ref), image, timestamp, window))

    def finish_bundle(self) -> Iterator[Any]:
        for identity, image, timestamp, window in self._asked:
            yield WindowedValue((identity.result(), image), timestamp, [window])


def _identity_now(ref: ImageRef) -> str:
    """The identity of the current generation; a unique one if the lookup fails, so that reading reports the failure."""
    try:
        return dataclasses.replace(ref, generation=look_up(ref)).identity
    except ImageError:
        return f"{ref.identity}#{ref.message_id or uuid.uuid4().hex}"


class _RememberInState(beam.DoFn):
    _LAST = ReadModifyWriteStateSpec("last", TupleCoder((StrUtf8Coder(), StrUtf8Coder())))
    _FORGET = TimerSpec("forget", TimeDomain.WATERMARK)

    def __init__(self, run: RunSettings):
        self._run = run
        self._seconds = Duration.of(run.deduplicate_s)

    def setup(self) -> None:
        shared = run_of(self._run)
        assert shared.attempts is not None  # noqa: S101  this is for steps that are not all in one process
        self._attempts, self._figures = shared.attempts, shared.figures

    def process(
        self,
        identity_and_image: tuple[str, ImageRef | EncodedImage],
        timestamp: Any = beam.DoFn.TimestampParam,
        last: Any = beam.DoFn.StateParam(_LAST),  # noqa: B008  how Beam's parameters are declared
        forget: Any = beam.DoFn.TimerParam(_FORGET),  # noqa: B008
    ) -> Iterator[Any]:
        image, known = identity_and_image[1], last.read()
        attempt = self._attempts.begin(_ref_of(image), known)
        if attempt is None:
            last.write(self._attempts.with_repeat(_ref_of(image), known))
            self._figures.add_duplicate()
            return
        last.write(attempt)
        forget.set(timestamp + self._seconds)
        yield image

    @on_timer(_FORGET)
    def forget(self, last: Any = beam.DoFn.StateParam(_LAST)) -> None:  # noqa: B008
        last.clear()


def _ref_of(image: ImageRef | EncodedImage) -> ImageRef:
    return image.ref if isinstance(image, EncodedImage) else image
