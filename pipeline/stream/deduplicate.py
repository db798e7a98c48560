"""`DropDuplicates`: one result for each version of an image, however often it is asked for within a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.transforms.deduplicate import DeduplicatePerKey
from apache_beam.utils.timestamp import Duration

from pipeline.records import EncodedImage
from pipeline.stream.remembered import Repeat
from pipeline.stream.run import RunSettings, run_of


class NewAndRepeats(NamedTuple):
    """The outputs of `DropDuplicates`."""

    new: beam.PCollection[EncodedImage]
    repeats: beam.PCollection[Repeat]


@dataclasses.dataclass
class DropDuplicates(beam.PTransform):
    """Lets an image pass unless it is under way or has a result of late; the others come out as `repeats`.

    Element in: `EncodedImage`; out: the same, or the `Repeat` that it is. Bounded or unbounded. What is remembered lives in the
    process: a restart forgets it, and a failed bundle must end the process (as it does on local runners), or its images would
    be under way for ever.

    Args:
      run: The run whose memory this is.
    """

    run: RunSettings

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, images: beam.PCollection[EncodedImage]) -> NewAndRepeats:
        """Wires one DoFn; no shuffle, so that acknowledgement still waits for the answers."""
        parted = images | "Remember" >> beam.ParDo(_Remember(self.run)).with_outputs("repeats", main="images")
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
    def __init__(self, run: RunSettings):
        self._run = run

    def setup(self) -> None:
        self._recent = run_of(self._run).recent

    def process(self, image: EncodedImage) -> Iterator[Any]:
        repeat = self._recent.ask(image.ref)
        yield beam.pvalue.TaggedOutput("repeats", repeat) if repeat else image


def _by_identity(image: EncodedImage) -> tuple[str, EncodedImage]:
    return image.ref.identity, image


def _value(identity_and_image: tuple[str, EncodedImage]) -> EncodedImage:
    return identity_and_image[1]
