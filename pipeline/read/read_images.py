"""`ReadImages`: from patterns, folders, manifests and TFRecord shards to encoded images, by steps of the pipeline."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.transforms.window import GlobalWindows
from apache_beam.utils.windowed_value import WindowedValue

from pipeline.config import ReadConfig
from pipeline.failures import ImageError
from pipeline.figures import metrics
from pipeline.figures.summary import Tally
from pipeline.look_ahead import LookAhead, NoRoomError, Place, started_pool
from pipeline.read.fetch import Reserve, fetch, take_freely
from pipeline.read.list_images import is_tfrecord, list_images
from pipeline.records import DeadLetter, EncodedImage, ImageRef

_READ_AHEAD_IMAGES = 512  # enough for the detector's next request, so that it finds its images read
_READ_AHEAD_BYTES = 64_000_000


class ReadOutputs(NamedTuple):
    """The outputs of `ReadImages`: each listed image is in one of the first two, or was listed more than once.

    `counted` says how many images were read and skipped.
    """

    images: beam.PCollection[EncodedImage]
    dead: beam.PCollection[DeadLetter]
    counted: beam.PCollection[Tally]


@dataclasses.dataclass
class ReadImages(beam.PTransform):
    """Lists and reads images.

    Element out: `EncodedImage` for each distinct image, or a `DeadLetter`. Bounded. At least once, as the runner retries bundles.

    Args:
      patterns: Files, folders, globs (`**` matches any number of folders, also none), manifests, TFRecord shards; local or `gs://`.
      read: How to read.
      exclude: The job's output; results of an earlier run there are not input.
    """

    patterns: Sequence[str]
    read: ReadConfig = dataclasses.field(default_factory=ReadConfig)
    exclude: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, begin: beam.pvalue.PBegin) -> ReadOutputs:
        """Wires listing, dropping of doubles, and reading; TFRecord shards carry their images with them."""
        shards = [pattern for pattern in self.patterns if is_tfrecord(pattern)]
        files = [pattern for pattern in self.patterns if not is_tfrecord(pattern)]
        distinct = (
            begin
            | "Start" >> beam.Impulse()
            | "ListImages" >> beam.FlatMap(_list_all, files, self.exclude)
            | "GatherDoubles" >> beam.GroupByKey()
            | "DropDoubles" >> beam.ParDo(_DropDoubles()).with_outputs("counted", main="refs")
        )
        read = distinct.refs | "ReadAhead" >> beam.ParDo(ReadAhead(self.read)).with_outputs("dead", main="images")
        if not shards:
            return ReadOutputs(read.images, read.dead, distinct.counted)
        examples = (
            tuple(begin | f"ReadTFRecord{n}" >> ReadTFRecord(pattern) for n, pattern in enumerate(shards))
            | "FlattenTFRecords" >> beam.Flatten()
            | "CountExamples" >> beam.ParDo(_CountExamples()).with_outputs("dead", "counted", main="images")
        )
        return ReadOutputs(
            (read.images, examples.images) | "AllRead" >> beam.Flatten(),
            (read.dead, examples.dead) | "AllUnread" >> beam.Flatten(),
            (distinct.counted, examples.counted) | "AllCounted" >> beam.Flatten(),
        )


def _list_all(_start: bytes, patterns: Sequence[str], exclude: str) -> Iterator[tuple[str, ImageRef]]:
    for pattern in patterns:
        for ref in list_images(pattern, exclude):
            metrics.count_read()
            yield ref.uri, ref


class _Counting(beam.DoFn):
    """Gives its bundle's count when the bundle ends."""

    def start_bundle(self) -> None:
        self._tally = Tally()

    def finish_bundle(self) -> Iterator[Any]:
        counted = GlobalWindows.windowed_value_at_end_of_window(self._tally)
        yield beam.pvalue.TaggedOutput("counted", counted)


class _DropDoubles(_Counting):
    def process(self, uri_and_refs: tuple[str, Iterable[ImageRef]]) -> Iterator[ImageRef]:
        refs = list(uri_and_refs[1])
        self._tally.read += len(refs)
        self._tally.skipped += len(refs) - 1
        metrics.count_skipped(len(refs) - 1)
        yield refs[0]


class _CountExamples(_Counting):
    def process(self, example: EncodedImage | DeadLetter) -> Iterator[Any]:
        self._tally.read += 1
        yield beam.pvalue.TaggedOutput("dead", example) if isinstance(example, DeadLetter) else example


class ReadAhead(beam.DoFn):
    """Reads images on a pool of threads, ahead of the steps behind it.

    Those steps run while this one yields; the reads go on meanwhile, so that a detector which is fused with it never waits for
    storage. Bounded by count and by bytes, also where no size was listed: a read waits until its bytes have room before it takes
    them. Each image keeps its window and timestamp; one that has its bytes already passes.
    """

    def __init__(self, read: ReadConfig):
        self._settings = read

    def setup(self) -> None:
        self._pool = started_pool(self._settings.read_threads, "read")

    def teardown(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start_bundle(self) -> None:
        self._ahead: LookAhead[ImageRef, EncodedImage | DeadLetter] = LookAhead(
            self._start, _READ_AHEAD_IMAGES, _READ_AHEAD_BYTES
        )

    def process(
        self, ref: ImageRef | EncodedImage, timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[Any]:
        if isinstance(ref, EncodedImage):
            yield ref
        else:
            yield from map(_part, self._ahead.add(ref, timestamp, window))

    def finish_bundle(self) -> Iterator[Any]:
        return map(_part, self._ahead.rest())

    def _start(self, place: Place[ImageRef, EncodedImage | DeadLetter]) -> None:
        self._pool.submit(self._read, place)

    def _read(self, place: Place[ImageRef, EncodedImage | DeadLetter]) -> None:
        ref = place.element
        if place.held_bytes:  # started again with room for what it has; no need to look again how much that is
            ref = dataclasses.replace(ref, size_bytes=place.held_bytes)
        try:
            place.result.set_result(read_image(ref, self._settings, place.reserve))
        except NoRoomError:
            return
        except BaseException as err:  # noqa: BLE001  whoever waits for the result must learn of it
            place.result.set_exception(err)


def _part(read: WindowedValue) -> Any:
    if isinstance(read.value, EncodedImage):
        return read
    metrics.count_result(read.value)
    return beam.pvalue.TaggedOutput("dead", read)


def read_image(ref: ImageRef, read: ReadConfig, reserve: Reserve = take_freely) -> EncodedImage | DeadLetter:
    """Reads one image; what cannot be read becomes a dead letter that says why."""
    received_at, started = time.time(), time.monotonic()
    try:
        content, generation = fetch(ref, int(read.max_file_mb * 1e6), reserve)
    except ImageError as err:
        return err.dead_letter(ref)
    return EncodedImage(dataclasses.replace(ref, generation=generation), content, time.monotonic() - started, received_at)


class ReadTFRecord(beam.PTransform):
    """Reads TFRecord shards of `tf.Example`s with the TF Object Detection API's keys (`image/encoded`, `image/source_id`, …).

    Element out: `EncodedImage`, or a `DeadLetter` for an example without an image. An example's URI is its source id, else its
    file name, else a hash of its bytes.
    """

    def __init__(self, pattern: str):
        super().__init__()
        self._pattern = pattern

    def expand(self, begin: beam.pvalue.PBegin) -> beam.PCollection[EncodedImage | DeadLetter]:
        """Wires tfx-bsl's source; it decodes the examples into Arrow record batches."""
        from tfx_bsl.public.tfxio import TFExampleRecord

        source = TFExampleRecord(self._pattern, telemetry_descriptors=["pipeline"])
        return (
            begin
            | "TFExamples" >> source.BeamSource()
            | "ExamplesToImages" >> beam.FlatMap(images_of_examples)
            | "Redistribute" >> beam.Reshuffle()
        )


def images_of_examples(examples: Any) -> Iterator[EncodedImage | DeadLetter]:
    """The images of one Arrow record batch of `tf.Example`s."""
    columns = {
        name: examples.column(name).to_pylist()
        for name in ("image/encoded", "image/source_id", "image/filename")
        if name in examples.schema.names
    }
    nothing = [None] * examples.num_rows
    for encoded, *names in zip(
        *(columns.get(name, nothing) for name in ("image/encoded", "image/source_id", "image/filename")), strict=True
    ):
        metrics.count_read()
        content = bytes(encoded[0]) if encoded else b""
        name = next((value[0].decode("utf-8", "replace") for value in names if value and value[0]), "")
        digest = hashlib.sha256(content).hexdigest()[:16]
        ref = ImageRef(name or f"tfrecord:{digest}", generation=digest, size_bytes=len(content))
        if encoded:
            yield EncodedImage(ref, content, 0.0, time.time())
        else:
            letter = ImageError("read", "no_image", "the tf.Example has no 'image/encoded'").dead_letter(ref)
            metrics.count_result(letter)
            yield letter
