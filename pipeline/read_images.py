"""`ReadImages`: from patterns, folders, manifests and TFRecord shards to encoded images.

Listing and reading are steps of the pipeline.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import os
import posixpath
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from pipeline import progress
from pipeline.config import ReadConfig
from pipeline.errors import InputError
from pipeline.fetch import FetchError, fetch
from pipeline.globs import expand_pattern, is_folder, is_result
from pipeline.pools import started_pool
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.summary import Tally

_MANIFEST_ENDINGS = (".txt", ".csv", ".jsonl")
_TFRECORD = re.compile(r"\.tfrecords?(\b|$)|\.tfrecord-\d", re.IGNORECASE)
_READ_AHEAD_IMAGES = 512  # enough for the detector's next request, so that it finds its images read
_READ_AHEAD_BYTES = 64_000_000
_ASSUMED_BYTES = 1_000_000  # of an image whose size was not listed


class ReadOutputs(NamedTuple):
    """The outputs of `ReadImages`: each listed image is in one of the first two, or was listed more than once.

    `counted` holds ("", `Tally`)s of images read and skipped.
    """

    images: beam.PCollection[EncodedImage]
    dead: beam.PCollection[DeadLetter]
    counted: beam.PCollection[tuple[str, Tally]]


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


def is_tfrecord(pattern: str) -> bool:
    """Whether an input names TFRecord shards, by its name."""
    return bool(_TFRECORD.search(posixpath.basename(pattern)))


def is_manifest(pattern: str) -> bool:
    """Whether an input is a list of images, by its name."""
    return pattern.lower().endswith(_MANIFEST_ENDINGS)


def list_images(pattern: str, exclude: str = "") -> Iterator[ImageRef]:
    """All images that one input names, in order of their names.

    A manifest's lines are taken as they are; whether they can be read shows when they are. Everything else is listed now. A
    folder stands for all files below it but hidden ones.

    Raises:
      InputError: A manifest cannot be understood.
    """
    refs = _read_manifest(pattern) if is_manifest(pattern) else _list_files(pattern)
    for ref in refs:
        if not (exclude and is_result(ref.uri, exclude)):
            progress.count("listed")
            yield ref


def check_inputs(patterns: Sequence[str]) -> None:
    """Makes sure that each input names something, looking no further than its first file.

    Raises:
      InputError: One does not, or cannot be listed.
    """
    if not patterns:
        raise InputError("no input: expected --input with a file, folder, glob, gs:// pattern or manifest")
    for pattern in patterns:
        try:
            found = any(
                FileSystems.match([variant], limits=[1])[0].metadata_list for variant in expand_pattern(pattern)
            ) or os.path.isfile(pattern)
        except Exception as err:
            raise InputError(f"input {pattern}: cannot be listed: {' '.join(str(err).split())[:300]}") from err
        if not found:
            raise InputError(
                f"input {pattern}: no file matches; check the path (quote globs so that the shell leaves them alone)"
            )


def _list_files(pattern: str) -> Iterator[ImageRef]:
    if os.path.isfile(pattern):  # also when its name has characters that would mean something in a glob
        yield ImageRef(pattern.removeprefix("./"), size_bytes=os.path.getsize(pattern))
        return
    matches = FileSystems.match(expand_pattern(pattern))
    found = {entry.path.removeprefix("./"): entry.size_in_bytes for match in matches for entry in match.metadata_list}
    folder = os.path.normpath(pattern) if os.path.isdir(pattern) else pattern.removeprefix("./").rstrip("/")
    above = 0 if folder == "." else len(folder)
    for path in sorted(found):
        hidden = is_folder(pattern) and any(part.startswith(".") for part in path[above:].split("/"))
        if not (hidden or path.endswith("/") or os.path.isdir(path)):
            yield ImageRef(path, size_bytes=found[path] or 0)


def _read_manifest(path: str) -> Iterator[ImageRef]:
    found = [entry.path for match in FileSystems.match(expand_pattern(path)) for entry in match.metadata_list]
    for name in [path] if os.path.isfile(path) else found:
        folder = name.rsplit("/", 1)[0] if "/" in name else "."
        with FileSystems.open(name) as file:
            lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            try:
                for uri in _manifest_uris(lines, name):
                    yield ImageRef(_resolve(uri, folder))
            except (UnicodeDecodeError, csv.Error) as err:
                raise InputError(f"manifest {name}: expected UTF-8 text with one URI a line: {err}") from err


def _manifest_uris(lines: Iterable[str], path: str) -> Iterator[str]:
    """URIs of a manifest.

    .txt: one a line. .csv: the column `uri` or `path`, else the first. .jsonl: a text, {"uri"} or {"image": {"uri"}} a line.
    """
    if path.lower().endswith(".csv"):
        column = 0
        for number, row in enumerate(csv.reader(lines)):
            names = [cell.strip().lower() for cell in row]
            header = [name for name in ("uri", "path", "file", "filename", "image") if name in names] if number == 0 else []
            if header:
                column = names.index(header[0])
            elif len(row) > column and row[column].strip():
                yield row[column].strip()
        return
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and path.lower().endswith(".jsonl"):
            yield _json_uri(text, f"manifest {path}, line {number}")
        elif text and not text.startswith("#"):
            yield text


def _json_uri(text: str, where: str) -> str:
    try:
        row = json.loads(text)
        row = row.get("image", row) if isinstance(row, dict) else row
        uri = (row.get("uri") or row.get("path")) if isinstance(row, dict) else row
    except ValueError as err:
        raise InputError(f"{where}: expected JSON, got {text[:80]!r}") from err
    if not isinstance(uri, str) or not uri:
        raise InputError(f'{where}: expected a URI as a text, {{"uri": …}} or {{"image": {{"uri": …}}}}, got {text[:80]!r}')
    return uri


def _resolve(uri: str, folder: str) -> str:
    """A manifest's relative path is relative to the current folder, else to the manifest's own."""
    if "://" in uri or os.path.isabs(uri) or os.path.exists(uri):
        return uri
    beside = f"{folder}/{uri}"
    return beside if "://" in folder or os.path.exists(beside) else uri


def _list_all(_start: bytes, patterns: Sequence[str], exclude: str) -> Iterator[tuple[str, ImageRef]]:
    for pattern in patterns:
        for ref in list_images(pattern, exclude):
            yield ref.uri, ref


class _Counting(beam.DoFn):
    """Gives its bundle's count as ("", `Tally`) when the bundle ends."""

    def start_bundle(self) -> None:
        self._tally = Tally()

    def finish_bundle(self) -> Iterator[Any]:
        window = GlobalWindow()
        counted = WindowedValue(("", self._tally), window.max_timestamp(), (window,))
        yield beam.pvalue.TaggedOutput("counted", counted)


class _DropDoubles(_Counting):
    def process(self, uri_and_refs: tuple[str, Iterable[ImageRef]]) -> Iterator[ImageRef]:
        refs = list(uri_and_refs[1])
        self._tally.read += len(refs)
        self._tally.skipped += len(refs) - 1
        yield refs[0]


class _CountExamples(_Counting):
    def process(self, example: EncodedImage | DeadLetter) -> Iterator[Any]:
        self._tally.read += 1
        yield beam.pvalue.TaggedOutput("dead", example) if isinstance(example, DeadLetter) else example


class ReadAhead(beam.DoFn):
    """Reads images on a pool of threads, ahead of the steps behind it.

    Those steps run while this one yields; the reads go on meanwhile, so that a detector which is fused with it never waits for
    storage. Bounded by count and by bytes. Each image keeps its window and timestamp; one that has its bytes already passes.
    """

    def __init__(self, read: ReadConfig):
        self._read = read

    def setup(self) -> None:
        self._pool = started_pool(self._read.read_threads, "read")

    def teardown(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start_bundle(self) -> None:
        self._reads: deque[tuple[Future[EncodedImage | DeadLetter], int, Any, Any]] = deque()
        self._bytes = 0

    def process(
        self, ref: ImageRef | EncodedImage, timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[Any]:
        if isinstance(ref, EncodedImage):
            yield ref
            return
        size = ref.size_bytes or _ASSUMED_BYTES
        self._reads.append((self._pool.submit(read_image, ref, self._read), size, timestamp, window))
        self._bytes += size
        while len(self._reads) > _READ_AHEAD_IMAGES or (self._bytes > _READ_AHEAD_BYTES and len(self._reads) > 1):
            yield self._next()

    def finish_bundle(self) -> Iterator[Any]:
        while self._reads:
            yield self._next()

    def _next(self) -> Any:
        read, size, timestamp, window = self._reads.popleft()
        self._bytes -= size
        result = read.result()
        value = WindowedValue(result, timestamp, (window or GlobalWindow(),))
        return beam.pvalue.TaggedOutput("dead", value) if isinstance(result, DeadLetter) else value


def read_image(ref: ImageRef, read: ReadConfig) -> EncodedImage | DeadLetter:
    """Reads one image; what cannot be read becomes a dead letter that says why."""
    received_at, started = time.time(), time.monotonic()
    try:
        content, generation = fetch(ref, int(read.max_file_mb * 1e6))
    except FetchError as err:
        progress.count("dead")
        return DeadLetter(ref, "read", err.reason, str(err))
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
        progress.count("listed")
        content = bytes(encoded[0]) if encoded else b""
        name = next((value[0].decode("utf-8", "replace") for value in names if value and value[0]), "")
        digest = hashlib.sha256(content).hexdigest()[:16]
        ref = ImageRef(name or f"tfrecord:{digest}", generation=digest, size_bytes=len(content))
        if encoded:
            yield EncodedImage(ref, content, 0.0, time.time())
        else:
            progress.count("dead")
            yield DeadLetter(ref, "read", "no_image", "the tf.Example has no 'image/encoded'")
