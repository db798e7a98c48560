"""One result for each generation of an image within a time: duplicates are found in memory, or in the runner's state."""

from __future__ import annotations

import contextlib
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
from msgspec.structs import replace

from pipeline.read.fetch import RETRY_SECONDS
from pipeline.records import EncodedImage, ImageRef
from pipeline.stats import metrics
from pipeline.storage.store import retried
from pipeline.storage.stores import store_of
from pipeline.stream.run import StreamStep


class DropDuplicates(StreamStep):
    """Passes an image unless it is in progress or has a recent result; the others are counted, and get that result.

    Element in and out: `EncodedImage`. Bounded or unbounded. The cache is in the process: a restart forgets it. A failed bundle
    must end the process (as on local runners), or its images would stay in progress.
    """

    def process(self, image: EncodedImage) -> Iterator[EncodedImage]:
        if self._shared.recent.is_new(image.ref):
            yield image
        else:
            metrics.count_skipped()


@beam.typehints.with_output_types(tuple[str, ImageRef | EncodedImage])
class AddIdentity(beam.DoFn):
    """Adds the identity to each image; looks up missing generations at the end of the bundle, side by side.

    Element in: `ImageRef`, or `EncodedImage` if the image came with its message; out: the same with its identity.

    Args:
      threads: How many are looked up side by side.
    """

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
    if ref.generation:
        return ref.identity
    with contextlib.suppress(Exception):
        found = retried(store_of(ref.location).look_up, RETRY_SECONDS)(ref.location)
        return replace(ref, generation=found.generation).identity
    return f"{ref.identity}#{ref.message_id or uuid.uuid4().hex}"


@beam.typehints.with_output_types(ImageRef | EncodedImage)
class DropDuplicatesInState(StreamStep):
    """Drops and counts duplicates before images are read, by durable runner state.

    Element in: an image with its identity, by which they are shuffled; out: the image. An image that failed passes again if its
    last attempt was in this process. Beam's `DeduplicatePerKey` neither counts what it drops nor lets failed images pass.
    """

    _SEEN = ReadModifyWriteStateSpec("seen", BooleanCoder())
    _FORGET = TimerSpec("forget", TimeDomain.REAL_TIME)

    def process(
        self,
        identity_and_image: tuple[str, ImageRef | EncodedImage],
        seen: Any = beam.DoFn.StateParam(_SEEN),  # noqa: B008  how Beam's parameters are declared
        forget: Any = beam.DoFn.TimerParam(_FORGET),  # noqa: B008
    ) -> Iterator[Any]:
        _, image = identity_and_image
        if seen.read() and not self._shared.forget_failure(_ref_of(image)):
            metrics.count_skipped()
            return
        seen.write(True)
        forget.set(Timestamp.now() + self._run.config.stream.deduplicate_s)
        yield image

    @on_timer(_FORGET)
    def forget(self, seen: Any = beam.DoFn.StateParam(_SEEN)) -> None:  # noqa: B008
        seen.clear()


def _ref_of(image: ImageRef | EncodedImage) -> ImageRef:
    return image.ref if isinstance(image, EncodedImage) else image
