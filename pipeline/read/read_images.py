"""`ReadImages`: from patterns, folders, manifests and TFRecord files to encoded images, by steps of the pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import apache_beam as beam
from apache_beam.transforms.window import GlobalWindows

from pipeline.config import ReadConfig
from pipeline.figures import metrics
from pipeline.figures.summary import Tally
from pipeline.read.fetch import RETRY_SECONDS
from pipeline.read.list_images import Piece, check_inputs, list_pieces, pieces_of
from pipeline.read.read_ahead import ReadAhead
from pipeline.read.source import ReadOutputs, Source
from pipeline.read.tfrecords import images_of_file, is_tfrecord
from pipeline.records import EncodedImage, ImageRef, identity_hash, name_bytes, name_of
from pipeline.storage.listing import AT_ONCE

# An image on its way through the shuffle: its name in bytes, since a text would have to be Unicode there, which not every name
# is; `extra`; `size_bytes`. So it takes 210 bytes of a local runner's memory, a record with a key of its own took 750.
_Listed = tuple[bytes, str, int]
_PARTITIONS = 4096  # each in memory at once: 25,000 names of 100 million


@dataclasses.dataclass
class ReadImages(Source):
    """Lists and reads images.

    Element out: `EncodedImage` for each distinct image, or a `DeadLetter`. Bounded. At least once, as the runner retries bundles.
    Only names are shuffled; no image's bytes are, nor are they held anywhere but on their way to the next step.

    Args:
      inputs: Files, folders, globs (`**` matches any number of folders, also none), manifests, TFRecord files; local or `gs://`.
        Or by the names that messages use, each with the patterns that it stands for, of which one must name something.
      read: How to read.
      exclude: The job's output; what this program wrote there is skipped.
      allow_empty: For `check`: an input may name nothing.
      retry_seconds: How long an image is tried again while storage fails in a way that may pass.
    """

    inputs: Sequence[str] | Mapping[str, Sequence[str]]
    read: ReadConfig = dataclasses.field(default_factory=ReadConfig)
    exclude: str = ""
    allow_empty: bool = False
    retry_seconds: float = RETRY_SECONDS

    def __post_init__(self) -> None:
        super().__init__()
        named = self.inputs if isinstance(self.inputs, Mapping) else {pattern: (pattern,) for pattern in self.inputs}
        self._inputs: Mapping[str, Sequence[str]] = named

    def check(self) -> None:
        """Makes sure that each input names something, looking no further than its first file."""
        check_inputs(self._inputs, self.allow_empty)

    def expand(self, begin: beam.pvalue.PBegin) -> ReadOutputs:
        """Wires listing, dropping of doubles, and reading, in one line: a Flatten would make the runner keep all images."""
        patterns = [pattern for patterns in self._inputs.values() for pattern in patterns]
        pieces = begin | "Start" >> beam.Impulse() | "FindFolders" >> beam.FlatMap(_find_folders, patterns)
        spread = pieces | "SpreadFolders" >> beam.Reshuffle()
        listed = spread | "ListImages" >> beam.ParDo(_ListImages(self.exclude)).with_outputs("counted", main="refs")
        distinct = (
            listed.refs
            | "GatherDoubles" >> beam.GroupByKey()
            | "DropDoubles" >> beam.ParDo(_DropDoubles()).with_outputs("counted", main="refs")
        )
        opened = distinct.refs | "OpenTFRecords" >> beam.ParDo(_OpenTFRecords(self.read, self.retry_seconds)).with_outputs(
            "dead", "counted", main="images"
        )
        read = opened.images | "ReadAhead" >> beam.ParDo(ReadAhead(self.read, self.retry_seconds)).with_outputs(
            "dead", main="images"
        )
        return ReadOutputs(
            read.images,
            (opened.dead, read.dead) | "AllUnread" >> beam.Flatten(),
            (listed.counted, distinct.counted, opened.counted) | "AllCounted" >> beam.Flatten(),
        )


def _find_folders(_start: bytes, patterns: Sequence[str]) -> Iterator[list[Piece]]:
    """Where to look for images, in groups of what one worker lists side by side."""
    pieces = pieces_of(patterns)
    while group := list(islice(pieces, AT_ONCE)):
        yield group


class _Counting(beam.DoFn):
    """Gives its bundle's count when the bundle ends."""

    def start_bundle(self) -> None:
        self._tally = Tally()

    def finish_bundle(self) -> Iterator[Any]:
        counted = GlobalWindows.windowed_value_at_end_of_window(self._tally)
        yield beam.pvalue.TaggedOutput("counted", counted)


class _ListImages(_Counting):
    """Lists groups of places, and skips what an earlier run of this program wrote there."""

    def __init__(self, exclude: str):
        self._exclude = exclude

    def process(self, group: Sequence[Piece]) -> Iterator[tuple[int, _Listed]]:
        for ref in list_pieces(group, self._exclude, self._skip):
            if not is_tfrecord(ref.uri):
                metrics.count_read()
            yield identity_hash(ref.uri) % _PARTITIONS, (name_bytes(ref.uri), ref.extra, ref.size_bytes)

    def _skip(self) -> None:
        self._tally.read += 1
        self._tally.skipped += 1
        metrics.count_read()
        metrics.count_skipped()


class _DropDoubles(_Counting):
    """Passes each image's ref once, and each TFRecord file's, which is no image."""

    def process(self, partition: tuple[int, Iterable[_Listed]]) -> Iterator[ImageRef]:
        best: dict[bytes, tuple[str, int]] = {}
        images = doubles = 0
        for name, extra, size_bytes in partition[1]:
            known = best.get(name)
            best[name] = max(known or ("", 0), (extra, size_bytes))  # the one of which something is said, and always the same
            if not is_tfrecord(name_of(name)):
                images += 1
                doubles += known is not None
        self._tally.read += images
        self._tally.skipped += doubles
        metrics.count_skipped(doubles)
        for name, (extra, size_bytes) in best.items():
            yield ImageRef(name_of(name), size_bytes=size_bytes, extra=extra)  # no generation: what is read is the newest


class _OpenTFRecords(_Counting):
    """Puts the images of a TFRecord file in its place; other refs pass."""

    def __init__(self, read: ReadConfig, retry_seconds: float):
        self._max_bytes = int(read.max_file_mb * 1e6)
        self._retry_seconds = retry_seconds

    def process(self, ref: ImageRef) -> Iterator[Any]:
        if not is_tfrecord(ref.uri):
            yield ref
            return
        for image in images_of_file(ref, self._max_bytes, self._retry_seconds):
            self._tally.read += 1
            metrics.count_read()
            if isinstance(image, EncodedImage):
                yield image
            else:
                metrics.count_result(image)
                yield beam.pvalue.TaggedOutput("dead", image)
