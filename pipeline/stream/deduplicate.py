"""`DropDuplicates`: one result for each version of an image, however often it is asked for within a time."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.transforms.deduplicate import DeduplicatePerKey
from apache_beam.utils.timestamp import Duration

from pipeline.records import EncodedImage, ImageRef

_MOST = 200_000  # identities remembered; about 60 MB
_shared: dict[str, RecentIdentities] = {}
_shared_lock = threading.Lock()


class RecentIdentities:
    """Remembers identities for a time, at most so many; thread-safe.

    Args:
      seconds: How long.
      most: How many; the oldest are forgotten first.
      clock: Seconds, monotonic.
    """

    def __init__(self, seconds: float, most: int = _MOST, clock: Callable[[], float] = time.monotonic):
        self._seconds = seconds
        self._most = most
        self._clock = clock
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._seen)

    def is_new(self, identity: str) -> bool:
        """Whether an identity is seen for the first time within the time; remembers it."""
        now = self._clock()
        with self._lock:
            while self._seen and (len(self._seen) > self._most or next(iter(self._seen.values())) <= now - self._seconds):
                self._seen.popitem(last=False)
            if identity in self._seen:
                return False
            self._seen[identity] = now
            return True


class NewAndRepeats(NamedTuple):
    """The outputs of `DropDuplicates`."""

    new: beam.PCollection[EncodedImage]
    repeats: beam.PCollection[ImageRef]


@dataclasses.dataclass
class DropDuplicates(beam.PTransform):
    """Lets each identity pass once within a time; the others come out as `repeats`.

    Element in: `EncodedImage`; out: the same, or its `ImageRef`. Bounded or unbounded. What is remembered lives in the process:
    a restart forgets it, and a failed bundle must end the process (as it does on Prism), or its images would be taken for
    repeats when they come again.

    Args:
      job: Names the run whose memory this is.
      seconds: How long an identity is remembered.
    """

    job: str
    seconds: float

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, images: beam.PCollection[EncodedImage]) -> NewAndRepeats:
        """Wires one DoFn; no shuffle, so that acknowledgement still waits for the answers."""
        parted = images | "Remember" >> beam.ParDo(_Remember(self.job, self.seconds)).with_outputs("repeats", main="images")
        return NewAndRepeats(parted.images, parted.repeats)


@dataclasses.dataclass
class DropDuplicatesInState(beam.PTransform):
    """The same through runner state (Beam's `Deduplicate`), for runners that keep it durably; repeats vanish.

    Args:
      seconds: How long an identity is remembered, in event time (processing-time timers would hold the archive's windows back).
    """

    seconds: float

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, images: beam.PCollection[EncodedImage]) -> beam.PCollection[EncodedImage]:
        """Wires Beam's transform over the identity."""
        return (
            images
            | "ByIdentity" >> beam.Map(_by_identity).with_output_types(tuple[str, EncodedImage])
            | "Deduplicate" >> DeduplicatePerKey(event_time_duration=Duration.of(self.seconds))
            | "DropKey" >> beam.Map(_value).with_output_types(EncodedImage)
        )


class _Remember(beam.DoFn):
    def __init__(self, job: str, seconds: float):
        self._job = job
        self._seconds = seconds

    def setup(self) -> None:
        with _shared_lock:
            self._recent = _shared.setdefault(self._job, RecentIdentities(self._seconds))

    def process(self, image: EncodedImage) -> Iterator[Any]:
        yield image if self._recent.is_new(image.ref.identity) else beam.pvalue.TaggedOutput("repeats", image.ref)


def _by_identity(image: EncodedImage) -> tuple[str, EncodedImage]:
    return image.ref.identity, image


def _value(identity_and_image: tuple[str, EncodedImage]) -> EncodedImage:
    return identity_and_image[1]
