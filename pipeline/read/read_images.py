"""`ReadImages`: from patterns, folders, manifests and TFRecord files to encoded images, by steps of the pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.transforms.window import GlobalWindows

from pipeline.config import ReadConfig
from pipeline.read.allowed import refusal
from pipeline.read.fetch import RETRY_SECONDS
from pipeline.read.letters import AskAgain, images_of_letter, is_letter, named_in
from pipeline.read.list_images import NOT_ALLOWED, Piece, check_inputs, folders_of, list_pieces, pieces_of
from pipeline.read.manifests import is_bad_line, letter_of_line
from pipeline.read.only_new import (
    CompletedKeys,
    CompletedNames,
    KeyBlocks,
    ResumedNames,
    keys_completed,
    keys_resumed,
    packed_key,
    partition_of,
)
from pipeline.read.read_ahead import ReadAhead
from pipeline.read.source import ReadOutputs, Source
from pipeline.read.tfrecords import images_of_file, is_tfrecord
from pipeline.records import DeadLetter, EncodedImage, ImageRef, name_bytes, name_of
from pipeline.stats import metrics
from pipeline.stats.summary import JobStats
from pipeline.stats.worker_context import WorkerContext
from pipeline.storage.completion import CompletionRule
from pipeline.storage.ledger import RowsFile, list_files_of_rows
from pipeline.storage.listing import MAX_PARALLEL
from pipeline.storage.results import DEAD_LETTERS
from pipeline.storage.spill_files import SpillFile

# An image on its way through the shuffle: its name in bytes, since a text would have to be Unicode there, which not every name
# is; `extra`; `size_bytes`; its key, where what is done is left out (see `only_new`). So it takes 210 bytes of a local runner's
# memory, a record with a key of its own took 750. Without a name it is a block of keys, and its second part says of
# what: `_DONE` or `_BEGUN`.
_Listed = tuple[bytes, str, int, bytes]
_DONE, _BEGUN = "done", "begun"
_Named = tuple[bytes, str, int]  # an image that is to be read: the first three
_GROUP_IMAGES = 64  # a second of a GPU's work; what a worker has more than others when all else is done


@dataclasses.dataclass
class ReadImages(Source):
    """Lists and reads images.

    Element out: `EncodedImage` for each distinct image, or a `DeadLetter`. Bounded. At least once, as the runner retries bundles.
    Only names are shuffled; no image's bytes are, nor are they held anywhere but on their way to the next step.

    Args:
      inputs: Files, folders, globs (`**` matches any number of folders, also none), manifests, TFRecord files; local or `gs://`.
        Or by the names that messages use, each with the patterns that it stands for, of which one must name something.
      read: How to read.
      exclude: The job's output; what this program wrote there, and in other results folders below an input, is skipped.
      allowed: Folders below which lists that are found in an input may name images, beside the folders of the inputs.
      allow_empty: For `check`: an input may name nothing.
      retry_seconds: How long an image is tried again while storage fails transiently.
      done: What counts as done by the ledger in `exclude`, and is skipped; None: nothing does.
      again: With `done`: the images of the dead letters there are read, too; says what one asks for.
      begun: Spills of rows that a killed run of this command left; their images are counted as read, and not read again.
      worker_context: What workers elsewhere must reach before they begin; None: the launcher's process does all.
      rebalance: Whether to spread the names over the workers once more when doubles are dropped: one worker drops those of a
        part of all names, and would read all of its images.
    """

    inputs: Sequence[str] | Mapping[str, Sequence[str]]
    read: ReadConfig = dataclasses.field(default_factory=ReadConfig)
    exclude: str = ""
    allowed: Sequence[str] = ()
    allow_empty: bool = False
    retry_seconds: float = RETRY_SECONDS
    done: CompletionRule | None = None
    again: AskAgain | None = None
    begun: Sequence[SpillFile] = ()
    worker_context: WorkerContext | None = None
    rebalance: bool = True

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
        listed, distinct = self.list(begin)
        opened = distinct.refs | "OpenTFRecords" >> beam.ParDo(self._open_tfrecords()).with_outputs(
            "dead", "counted", main="images"
        )
        read = opened.images | "ReadAhead" >> beam.ParDo(ReadAhead(self.read, self.retry_seconds)).with_outputs(
            "dead", main="images"
        )
        return ReadOutputs(
            read.images,
            (opened.dead, read.dead) | "AllUnread" >> beam.Flatten(),
            (listed.counted, distinct.counted, opened.counted) | "AllCounted" >> beam.Flatten(),
            distinct.expected,
        )

    def list(self, begin: beam.pvalue.PBegin) -> tuple[Any, _Distinct]:
        """Wires what needs no bytes: what is listed, and once each what is to be read; of both `refs` and `counted`."""
        find = beam.FlatMap(_find_folders, self._patterns, self.exclude if self.done else "", self.begun)
        pieces = begin | "Start" >> beam.Impulse() | "FindFolders" >> find
        spread = pieces | "SpreadFolders" >> beam.Reshuffle()
        listing = _ListImages(self.exclude, self.done, self.again, self.worker_context, self._may_be_named())
        listed = spread | "ListImages" >> beam.ParDo(listing).with_outputs("counted", main="refs")
        gathered = listed.refs | "GatherDoubles" >> beam.GroupByKey()
        distinct = gathered | "DropDoubles" >> beam.ParDo(_DropDoubles()).with_outputs("counted", main="groups")
        groups, expected = distinct.groups, tuple[beam.PCollection[int], ...]()
        if self.rebalance:
            groups = distinct.groups | "SpreadImages" >> beam.Reshuffle()
            sizes = distinct.groups | "GroupSizes" >> beam.Map(len)
            expected = (sizes | "CountExpected" >> beam.CombineGlobally(sum),)
        refs = groups | "EachImage" >> beam.FlatMap(_refs_of)
        return listed, _Distinct(refs, distinct.counted, expected)

    def _open_tfrecords(self) -> _OpenTFRecords:
        ledger = (self.exclude, self.done) if self.done else None
        return _OpenTFRecords(self.read, self.retry_seconds, ledger, self.again, self.begun, allowed=self._may_be_named())

    def _may_be_named(self) -> Sequence[str]:
        return (*self.allowed, *folders_of(self._patterns))


def _find_folders(_start: bytes, patterns: Sequence[str], ledger: str, begun: Sequence[SpillFile]) -> Iterator[list[Any]]:
    """Where to look for images, and for what is done or begun, in groups of what one worker looks at side by side."""
    for pieces in (pieces_of(patterns), iter(list_files_of_rows(ledger) if ledger else ()), iter(begun)):
        while group := list(islice(pieces, MAX_PARALLEL)):
            yield group


class _Distinct(NamedTuple):
    """What is to be read, once each; what was counted on the way; and how many, where the names are spread."""

    refs: beam.PCollection[ImageRef]
    counted: beam.PCollection[JobStats]
    expected: tuple[beam.PCollection[int], ...]


class _Counting(beam.DoFn):
    """Gives its bundle's count when the bundle ends."""

    def start_bundle(self) -> None:
        self._tally = JobStats()

    def _skip(self, images: int = 1, *, done: bool = False) -> None:
        """Counts images that need nothing; `done`: since an earlier run or a stream has done them."""
        self._tally.skipped += images
        self._tally.done += images if done else 0
        metrics.count_skipped(images)

    def finish_bundle(self) -> Iterator[Any]:
        counted = GlobalWindows.windowed_value_at_end_of_window(self._tally)
        yield beam.pvalue.TaggedOutput("counted", counted)


class _ListImages(_Counting):
    """Lists groups of places, and skips own files and what is no image there; of files of rows reads what is done."""

    def __init__(
        self,
        exclude: str,
        done: CompletionRule | None,
        again: AskAgain | None,
        worker_context: WorkerContext | None,
        allowed: Sequence[str],
    ):
        self._exclude = exclude
        self._done = done
        self._again = again
        self._worker_context = worker_context
        self._allowed = allowed

    def setup(self) -> None:
        if self._worker_context:
            self._worker_context.check_worker()

    def start_bundle(self) -> None:
        super().start_bundle()
        self._blocks = {_DONE: KeyBlocks(), _BEGUN: KeyBlocks()}

    def process(self, group: Sequence[Piece | RowsFile | SpillFile]) -> Iterator[tuple[int, _Listed]]:
        files = [each for each in group if isinstance(each, RowsFile)]
        if files and self._done:
            yield from _as_listed(_DONE, self._blocks[_DONE].add(keys_completed(files, self._done)))
        spills = [each for each in group if isinstance(each, SpillFile)]
        yield from _as_listed(_BEGUN, self._blocks[_BEGUN].add(keys_resumed(spills)))
        for ref in self._refs(files, [each for each in group if not isinstance(each, (RowsFile, SpillFile))]):
            if not _holds_images(ref.uri):
                metrics.count_read()
            key = packed_key(ref) if self._done else b""
            yield partition_of(ref.uri), (name_bytes(ref.uri), ref.extra, ref.size_bytes, key)

    def _refs(self, files: Sequence[RowsFile], pieces: Sequence[Piece]) -> Iterator[ImageRef]:
        for file in files:
            if self._again and file.kind == DEAD_LETTERS:
                yield from named_in(file, self._again)
        yield from list_pieces(pieces, self._exclude, self._leave_out, self._allowed)

    def finish_bundle(self) -> Iterator[Any]:
        for what, blocks in self._blocks.items():
            yield from map(GlobalWindows.windowed_value_at_end_of_window, _as_listed(what, blocks.flush()))
        yield from super().finish_bundle()

    def _leave_out(self, kind: str) -> None:
        self._tally.read += 1
        self._tally.leave_out(kind)
        metrics.count_read()
        self._skip()


def _as_listed(what: str, blocks: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, _Listed]]:
    return ((partition, (b"", what, 0, keys)) for partition, keys in blocks)


class _DropDoubles(_Counting):
    """Passes each image's name once, and each TFRecord file's, which is no image; and none that is done.

    Names come in groups of a bounded size, which can be shuffled for less than each by itself. A TFRecord file is a group: it is
    as much work as thousands of images.
    """

    def setup(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_PARALLEL, "ask-generation")  # its threads start when they are needed

    def teardown(self) -> None:
        self._pool.shutdown()

    def process(self, partition: tuple[int, Iterable[_Listed]]) -> Iterator[list[_Named]]:
        best: dict[bytes, tuple[bool, str, int]] = {}
        keys: dict[bytes, bytes] = {}
        blocks: dict[str, list[bytes]] = {_DONE: [], _BEGUN: []}
        images = doubles = 0
        for name, extra, size_bytes, key in partition[1]:
            if not name:
                blocks[extra].append(key)
                continue
            known = best.get(name)
            # one that may be read, the one of which something is said, and always the same
            best[name] = max(known or (False, "", NOT_ALLOWED), (size_bytes != NOT_ALLOWED, extra, size_bytes))
            if not _holds_images(name_of(name)):
                images += 1
                doubles += known is not None
                keys[name] = max(keys.get(name, b""), key)
        all_begun = ResumedNames(blocks[_BEGUN])
        begun = all_begun.among(best)
        gone = all_begun.but(begun[name] for name in keys if name in begun)  # listed when the run began, or in a TFRecord file
        done = CompletedNames(blocks[_DONE], self._pool).among({name: key for name, key in keys.items() if name not in begun})
        self._tally.read += images + gone
        metrics.count_read(gone)
        self._skip(doubles)
        self._skip(len(done), done=True)
        wanted = [(name, *of_name[1:]) for name, of_name in best.items() if name not in done and name not in begun]
        yield from ([each] for each in wanted if _holds_images(name_of(each[0])))
        names = (each for each in wanted if not _holds_images(name_of(each[0])))
        while group := list(islice(names, _GROUP_IMAGES)):
            yield group


def _refs_of(group: Iterable[_Named]) -> Iterator[ImageRef]:
    """Without generations: what is read is the newest."""
    return (ImageRef(name_of(name), size_bytes=size_bytes, extra=extra) for name, extra, size_bytes in group)


def _holds_images(name: str) -> bool:
    """Whether a name is not that of an image, but of what has images within, or should have."""
    return is_tfrecord(name) or is_letter(name) or is_bad_line(name)


class _OpenTFRecords(_Counting):
    """Puts the images of a TFRecord file, or a dead letter, in its place, but for those done or begun; other refs pass."""

    def __init__(
        self,
        read: ReadConfig,
        retry_seconds: float,
        ledger: tuple[str, CompletionRule] | None,
        again: AskAgain | None,
        begun: Sequence[SpillFile],
        *,
        allowed: Sequence[str],
    ):
        self._max_bytes = int(read.max_file_mb * 1e6)
        self._retry_seconds = retry_seconds
        self._ledger = ledger
        self._again = again
        self._begun_spills = begun
        self._allowed = allowed

    def setup(self) -> None:
        self._begun: Container[ImageRef] = ()
        self._done: Container[ImageRef] | None = None

    def process(self, ref: ImageRef) -> Iterator[Any]:
        if ref.size_bytes == NOT_ALLOWED:
            yield self._refused(ref)
            return
        if not _holds_images(ref.uri):
            yield ref
            return
        if self._done is None:
            self._begun = CompletedKeys(keys_resumed(self._begun_spills))
            self._done = CompletedKeys.of(*self._ledger) if self._ledger else ()
        for image in self._images(ref):
            if image.ref in self._begun:
                continue  # it is counted where its row is found to have no name in the listing
            self._tally.read += 1
            metrics.count_read()
            if image.ref in self._done:
                self._skip(done=True)
            elif isinstance(image, EncodedImage):
                yield image
            else:
                metrics.count_result(image)
                yield beam.pvalue.TaggedOutput("dead", image)

    def _refused(self, ref: ImageRef) -> Any:
        if _holds_images(ref.uri):  # else it was counted as read where it was listed
            self._tally.read += 1
            metrics.count_read()
        letter = refusal(ref.uri, self._allowed).dead_letter(dataclasses.replace(ref, size_bytes=0))
        metrics.count_result(letter)
        return beam.pvalue.TaggedOutput("dead", letter)

    def _images(self, ref: ImageRef) -> Iterator[EncodedImage | DeadLetter]:
        if is_bad_line(ref.uri):
            return iter((letter_of_line(ref),))
        if self._again and is_letter(ref.uri):
            return images_of_letter(ref, self._again, self._retry_seconds)
        return images_of_file(ref, self._max_bytes, self._retry_seconds)
