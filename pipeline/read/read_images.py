"""`ReadImages`: lists inputs, drops doubles and what is done, and reads the rest.

The work is divided: groups of folders are listed side by side, names are grouped by hash, and each worker reads its names.
What is done is left out by an anti-join of the listing with the keys of the rows that are there (`done_rows`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress, islice
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.transforms.window import GlobalWindows

from pipeline.config import ReadConfig
from pipeline.read.containers import MAX_MEGAPIXELS, images_in, is_container
from pipeline.read.dead_letter_replay import DeadLetterReplay, are_letters
from pipeline.read.done_rows import DoneRows
from pipeline.read.fetch import RETRY_SECONDS
from pipeline.read.image_names import kind_of
from pipeline.read.list_images import Piece, check_inputs, folders_of, list_pieces, pieces_of
from pipeline.read.read_ahead import ReadAhead
from pipeline.records import DeadLetter, EncodedImage, ImageRef, identity_hash, name_bytes, name_of
from pipeline.results.cancellation import until_cancelled
from pipeline.secrets import public_address
from pipeline.stats import metrics
from pipeline.stats.summary import JobStats
from pipeline.stats.worker_context import WorkerContext
from pipeline.storage.listing import MAX_PARALLEL

# An image in the shuffle: its location in bytes, since not every name is Unicode; `extra`; `size_bytes`; its generation, if what
# is done is left out. It takes 210 bytes of a local runner's memory; a record took 750.
_Listed = tuple[bytes, str, int, str]
_Named = tuple[bytes, str, int]  # an image to read: the first three
_REFS_AT_ONCE = 4096
_PARTITIONS = 4096  # each in memory at once: 25,000 names of 100 million
_GROUP_IMAGES = 64  # a second of a GPU's work: how much longer than others one worker may take at the end


class ReadOutputs(NamedTuple):
    """The outputs of `ReadImages`. Each distinct image is in `images` or `dead`.

    Attributes:
      images: Images to detect in.
      dead: Images that could not be read.
      counted: How many were read and skipped; `read` counts all three kinds.
    """

    images: beam.PCollection[ImageRef | EncodedImage]
    dead: beam.PCollection[DeadLetter]
    counted: beam.PCollection[JobStats]


@dataclasses.dataclass
class ReadImages(beam.PTransform):
    """Lists and reads images.

    Element out: `EncodedImage` for each distinct image, or a `DeadLetter`. Bounded. At least once, as the runner retries bundles.
    Only names are shuffled, never images' bytes.

    Args:
      inputs: Files, folders, globs (`**` matches any number of folders, also none), manifests, TFRecord files, archives,
        videos; local or `gs://`. Or a mapping from the name that messages show to its patterns, one of which must name something.
      read: How to read.
      exclude: The job's output. This program's own files there, and in results folders below an input, are skipped.
      allowed: Folders below which lists that a glob names may name images, beside the folders of the inputs.
      allow_empty: For `check`: an input may name nothing.
      retry_seconds: How long an image is retried while storage fails.
      done: The rows that count as done, whose images are skipped; None: none do.
      again: With `done`: replays the dead letters in `exclude`, too.
      worker_context: What remote workers must reach before they begin; None: the launcher's process does all.
      max_megapixels: Videos of larger frames are refused.
      rebalance: Whether to spread the names over the workers again after doubles are dropped. Else the worker that drops the
        doubles of a partition reads all of its images.
      fetch: Whether to read the images. Else an image file is passed on as its `ImageRef`, and `DetectObjects` reads it.
    """

    inputs: Sequence[str] | Mapping[str, Sequence[str]]
    read: ReadConfig = dataclasses.field(default_factory=ReadConfig)
    exclude: str = ""
    allowed: Sequence[str] = ()
    allow_empty: bool = False
    retry_seconds: float = RETRY_SECONDS
    done: DoneRows | None = None
    again: DeadLetterReplay | None = None
    worker_context: WorkerContext | None = None
    max_megapixels: float = MAX_MEGAPIXELS
    rebalance: bool = True
    fetch: bool = True

    def __post_init__(self) -> None:
        super().__init__()
        named = self.inputs if isinstance(self.inputs, Mapping) else {pattern: (pattern,) for pattern in self.inputs}
        self._inputs: Mapping[str, Sequence[str]] = named
        self._patterns = [pattern for patterns in named.values() for pattern in patterns]

    def check(self) -> None:
        """Makes sure that each input names something, looking no further than its first file."""
        if not self.again:
            check_inputs(self._inputs, self.allow_empty)

    def expand(self, begin: beam.pvalue.PBegin) -> ReadOutputs:
        """Wires listing, dropping of doubles, and reading, in one line: a Flatten would make the runner keep all images."""
        find = beam.FlatMap(_find_folders, self._patterns, self.exclude if self.again else "")
        pieces = begin | "Start" >> beam.Impulse() | "FindFolders" >> find
        spread = pieces | "SpreadFolders" >> beam.Reshuffle()
        listing = beam.ParDo(_ListImages(self._listing(), self.worker_context))
        listed = spread | "ListImages" >> listing.with_outputs("dead", "counted", main="refs")
        gathered = listed.refs | "GatherDoubles" >> beam.GroupByKey()
        distinct = gathered | "DropDoubles" >> beam.ParDo(_DropDoubles(self.done)).with_outputs("counted", main="groups")
        groups = distinct.groups | "SpreadImages" >> beam.Reshuffle() if self.rebalance else distinct.groups
        refs = groups | "EachImage" >> beam.FlatMap(_refs_of)
        opening = _OpenContainers(self._listing(), self.read, self.retry_seconds, self.max_megapixels)
        opened = refs | "OpenContainers" >> beam.ParDo(opening).with_outputs("dead", "counted", main="images")
        images, dead = opened.images, [listed.dead, opened.dead]
        if self.fetch:
            read = images | "ReadAhead" >> beam.ParDo(ReadAhead(self.read, self.retry_seconds)).with_outputs(
                "dead", main="images"
            )
            images, dead = read.images, [*dead, read.dead]
        return ReadOutputs(
            images,
            dead | "AllUnread" >> beam.Flatten(),
            (listed.counted, distinct.counted, opened.counted) | "AllCounted" >> beam.Flatten(),
        )

    def _listing(self) -> _Listing:
        allowed = (*self.allowed, *folders_of(self._patterns))
        return _Listing(self.exclude, self.done, self.again, allowed)


class _Listing(NamedTuple):
    """The arguments of `ReadImages` by the same names, for its DoFns."""

    exclude: str
    done: DoneRows | None
    again: DeadLetterReplay | None
    allowed: Sequence[str]


def _find_folders(_start: bytes, patterns: Sequence[str], output: str) -> Iterator[list[Piece | str]]:
    """Places to list, in groups that one worker reads side by side, and a results folder whose dead letters are replayed."""
    pieces = pieces_of(patterns)
    while group := list(islice(pieces, MAX_PARALLEL)):
        yield [*group]
    if output:
        yield [output]


class _Counting(beam.DoFn):
    """Outputs the count of each bundle when it ends."""

    def start_bundle(self) -> None:
        self._stats = JobStats()

    def _count(self, images: int = 1) -> None:
        self._stats.read += images
        metrics.count_read(images)

    def _skip(self, images: int = 1, *, done: bool = False) -> None:
        """Counts skipped images; `done`: an earlier run or a stream has done them."""
        self._stats.skipped += images
        self._stats.done += images if done else 0
        metrics.count_skipped(images)

    def _leave_out(self, kind: str) -> None:
        self._count()
        self._stats.leave_out(kind)
        self._skip()

    def _dead(self, letter: DeadLetter) -> Any:
        metrics.count_results(letter)
        return beam.pvalue.TaggedOutput("dead", letter)

    def finish_bundle(self) -> Iterator[Any]:
        counted = GlobalWindows.windowed_value_at_end_of_window(self._stats)
        yield beam.pvalue.TaggedOutput("counted", counted)


class _ListImages(_Counting):
    """Lists groups of places, without own files and other non-images, and the images of dead letters.

    Images that are listed with their generation and are done go no further; so a run with little to do shuffles little.
    """

    def __init__(self, of: _Listing, worker_context: WorkerContext | None):
        self._of = of
        self._worker_context = worker_context

    def setup(self) -> None:
        if self._worker_context:
            self._worker_context.check_worker()

    def process(self, group: Sequence[Piece | str]) -> Iterator[Any]:
        for ref in until_cancelled(self._without_done(self._found(group))):
            if isinstance(ref, DeadLetter):
                self._count()
                yield self._dead(ref)
                continue
            if not _holds_images(ref.uri):
                metrics.count_read()
            generation = ref.generation if self._of.done else ""
            yield identity_hash(ref.uri) % _PARTITIONS, (name_bytes(ref.location), ref.extra, ref.size_bytes, generation)

    def _without_done(self, found: Iterator[ImageRef | DeadLetter]) -> Iterator[ImageRef | DeadLetter]:
        if not self._of.done or not len(self._of.done.keys):
            yield from found
            return
        while some := list(islice(found, _REFS_AT_ONCE)):
            refs = [each.ref if isinstance(each, DeadLetter) else each for each in some]
            done = self._of.done.among(refs)
            self._count(sum(done))
            self._skip(sum(done), done=True)
            yield from (each for each, is_done in zip(some, done, strict=True) if not is_done)

    def _found(self, group: Sequence[Piece | str]) -> Iterator[ImageRef | DeadLetter]:
        for output in (piece for piece in group if isinstance(piece, str)):
            yield from self._of.again.refs_in_results(output) if self._of.again else ()
        pieces = [piece for piece in group if not isinstance(piece, str)]
        yield from list_pieces(pieces, self._of.exclude, self._leave_out, self._of.allowed)


class _DropDoubles(_Counting):
    """Outputs the name of each image and TFRecord file once, unless it is done.

    Names leave in groups of a bounded size, which are cheaper to shuffle. A TFRecord file is a group: it is as much work as
    thousands of images.
    """

    def __init__(self, done: DoneRows | None):
        self._done = done

    def setup(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_PARALLEL, "ask-generation")  # its threads start when they are needed

    def teardown(self) -> None:
        self._pool.shutdown()

    def process(self, partition: tuple[int, Iterable[_Listed]]) -> Iterator[list[_Named]]:
        best: dict[str, tuple[str, int, bytes]] = {}
        generations: dict[str, str] = {}
        images = 0
        for location, extra, size_bytes, generation in partition[1]:
            uri = public_address(name_of(location))
            best[uri] = max(best.get(uri, ("", 0, b"")), (extra, size_bytes, location))  # one with `extra`; deterministic
            if not _holds_images(uri):
                images += 1
                generations[uri] = max(generations.get(uri, ""), generation)
        refs = [ImageRef(uri, generations[uri], signed_uri=name_of(best[uri][2])) for uri in generations]
        done = set(compress(generations, self._done.among(refs, self._pool))) if self._done else set()
        self._stats.read += images
        self._skip(images - len(generations))
        self._skip(len(done), done=True)
        wanted = [(uri, (location, extra, size)) for uri, (extra, size, location) in best.items() if uri not in done]
        yield from ([each] for uri, each in wanted if uri not in generations)
        names = (each for uri, each in wanted if uri in generations)
        while group := list(islice(names, _GROUP_IMAGES)):
            yield group


def _refs_of(group: Iterable[_Named]) -> Iterator[ImageRef]:
    """The refs have no generation: the newest one is read."""
    return (ImageRef.of_uri(name_of(name), size_bytes=size_bytes, extra=extra) for name, extra, size_bytes in group)


def _holds_images(name: str) -> bool:
    """Whether a name is that of what holds images: a container, or dead letters."""
    return is_container(name) or are_letters(name)


class _OpenContainers(_Counting):
    """Replaces a container or dead letters by their images, without those that are done; other refs pass."""

    def __init__(self, of: _Listing, read: ReadConfig, retry_seconds: float, max_megapixels: float):
        self._of = of
        self._read = read
        self._retry_seconds = retry_seconds
        self._max_megapixels = max_megapixels

    def process(self, ref: ImageRef) -> Iterator[Any]:
        if not _holds_images(ref.uri):
            yield ref
            return
        for image in until_cancelled(self._images(ref)):
            if isinstance(image, str):
                self._leave_out(kind_of(image))
                continue
            self._count()
            if self._of.done and self._of.done.among([image.ref])[0]:
                self._skip(done=True)
            else:
                yield image if isinstance(image, EncodedImage) else self._dead(image)

    def _images(self, ref: ImageRef) -> Iterator[EncodedImage | DeadLetter | str]:
        if self._of.again and are_letters(ref.uri):
            return self._of.again.open(ref)
        return images_in(ref, self._read, self._retry_seconds, self._max_megapixels)
