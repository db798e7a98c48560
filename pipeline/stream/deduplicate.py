"""One result for each generation of an image within a time: duplicates are found in memory, or in the runner's state."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import apache_beam as beam
from apache_beam.coders import BooleanCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec, TimerSpec, on_timer
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from pipeline.failures import ImageError
from pipeline.read.fetch import look_up
from pipeline.records import EncodedImage, ImageRef
from pipeline.stream.run import RunSettings, run_of


class DropDuplicates(beam.DoFn):
    """Passes an image unless it is in progress or has a recent result; the others are counted, and get that result.

    Element in and out: `EncodedImage`. Bounded or unbounded. The cache is in the process: a restart forgets it. A failed bundle
    must end the process (as on local runners), or its images would stay in progress.

    Args:
      run: The stream's settings; its `StreamRun` has the cache.
    """

    def __init__(self, run: RunSettings):
        self._run = run

    def setup(self) -> None:
        self._shared = run_of(self._run)

    def process(self, image: EncodedImage) -> Iterator[EncodedImage]:
        if self._shared.recent.is_new(image.ref):
            yield image
        else:
            self._shared.figures.add_duplicate()


@dataclasses.dataclass
class DropDuplicatesInState(beam.PTransform):
    """Drops and counts duplicates before images are read, by durable runner state.

    Element in and out: `ImageRef`, or `EncodedImage` if the image came with its message; they are shuffled. An image that failed
    passes again if its last attempt was in this process. Beam's `DeduplicatePerKey` neither counts what it drops nor lets failed
    images pass.

    Args:
      run: The stream's settings.
    """

    run: RunSettings

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, asked: beam.PCollection[ImageRef | EncodedImage]) -> beam.PCollection[ImageRef | EncodedImage]:
        """Wires the identity, and the state over it."""
        threads = self.run.config.read.read_threads
        return (
            asked
            | "ByIdentity" >> beam.ParDo(_Identify(threads)).with_output_types(tuple[str, ImageRef | EncodedImage])
            | "Deduplicate" >> beam.ParDo(_RememberInState(self.run)).with_output_types(ImageRef | EncodedImage)
        )


class _Identify(beam.DoFn):
    """Adds the identity to each image; looks up missing generations at the end of the bundle, side by side."""

    def __init__(self, threads: int):
        self._threads = threads

    def start_bundle(self) -> None:
        self._asked: list[WindowedValue] = []

    def process(
        self,
        image: ImageRef | EncodedImage,
        timestamp: Any = beam.DoFn.TimestampParam,
        window: Any = beam.DoFn.WindowParam,
    ) -> None:
        self._asked.append(WindowedValue(image, timestamp, [window]))

    def finish_bundle(self) -> Iterator[WindowedValue]:
        with ThreadPoolExecutor(self._threads, "look up") as pool:
            identities = pool.map(_identity_now, [_ref_of(asked.value) for asked in self._asked])
            for asked, identity in zip(self._asked, identities, strict=True):
                yield asked.with_value((identity, asked.value))


def _identity_now(ref: ImageRef) -> str:
    """The identity of the current generation; a unique one if the lookup fails, so that reading reports the failure."""
    try:
        return ref.identity if ref.generation else dataclasses.replace(ref, generation=look_up(ref)).identity
    except ImageError:
        return f"{ref.identity}#{ref.message_id or uuid.uuid4().hex}"


class _RememberInState(beam.DoFn):
    _SEEN = ReadModifyWriteStateSpec("seen", BooleanCoder())
    _FORGET = TimerSpec("forget", TimeDomain.REAL_TIME)

    def __init__(self, run: RunSettings):
        self._run = run

    def setup(self) -> None:
        self._shared = run_of(self._run)

    def process(
        self,
        identity_and_image: tuple[str, ImageRef | EncodedImage],
        seen: Any = beam.DoFn.StateParam(_SEEN),  # noqa: B008  how Beam's parameters are declared
        forget: Any = beam.DoFn.TimerParam(_FORGET),  # noqa: B008
    ) -> Iterator[Any]:
        _, image = identity_and_image
        if seen.read() and not self._shared.forget_failure(_ref_of(image)):
            self._shared.figures.add_duplicate()
            return
        seen.write(True)
        forget.set(Timestamp.now() + self._run.config.stream.deduplicate_s)
        yield image

    @on_timer(_FORGET)
    def forget(self, seen: Any = beam.DoFn.StateParam(_SEEN)) -> None:  # noqa: B008
        seen.clear()


def _ref_of(image: ImageRef | EncodedImage) -> ImageRef:
    return image.ref if isinstance(image, EncodedImage) else image
