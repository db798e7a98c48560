"""`ReadImages`: lists inputs, drops doubles and what is done, and opens containers; `DetectObjects` reads the images of files.

The work is divided: groups of folders are listed side by side, and names are grouped by hash.
What is done is left out by an anti-join of the listing with the keys of the rows that are there (`done_rows`), before a file is
looked at.
"""

from __future__ import annotations

import dataclasses
import operator
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, compress, islice
from typing import Any, NamedTuple, TypeVar

import apache_beam as beam
import numpy as np
from apache_beam.transforms.window import GlobalWindows
from msgspec.structs import replace

from pipeline.config import ReadConfig
from pipeline.failures import FOR_GOOD
from pipeline.listing.containers import MAX_MEGAPIXELS, archive_of, images_in, reading
from pipeline.listing.dead_letter_replay import DeadLetterReplay, are_letters
from pipeline.listing.done_rows import FAILED, NEW, DoneRows
from pipeline.listing.list_images import Piece, are_disjoint, folders_of, list_pieces, pieces_of
from pipeline.listing.names import file_of, is_container, kind_of, record_range
from pipeline.process import PROCESS
from pipeline.records import DeadLetter, EncodedImage, Image, ImageRef, identity_hash, name_bytes
from pipeline.results.contents import Contents, write_contents
from pipeline.stats import beam_metrics
from pipeline.stats.job_stats import JobStats
from pipeline.storage.listing import MAX_PARALLEL
from pipeline.storage.store import FoundFile
from pipeline.worker import WorkerContext

_AT_ONCE = 512  # fewer than make Python look for garbage
_PARTITIONS = 4096  # each in memory at once: 25,000 names of 100 million
_GROUP_IMAGES = 64  # a second of a GPU's work: how much longer than others one worker may take at the end


_PREFERENCE = operator.attrgetter("extra", "size_bytes", "generation", "location")  # of equal images one with `extra` stays

_Place = Piece | bytes  # where to list, or a results folder whose dead letters are replayed
_Found = TypeVar("_Found", FoundFile, ImageRef, FoundFile | ImageRef | DeadLetter)


class ReadOutputs(NamedTuple):
    """The outputs of `ReadImages`. Each distinct image is in `images` or `dead`.

    Attributes:
      images: Images to detect in: an `ImageRef` of a file, an `EncodedImage` of a container.
      dead: What could not be listed, and images of containers that could not be read.
      counted: How many were read and skipped; `read` counts all three kinds.
    """

    images: beam.PCollection[Image]
    dead: beam.PCollection[DeadLetter]
    counted: beam.PCollection[JobStats]


@dataclasses.dataclass
class ReadImages(beam.PTransform):
    """Lists images, and reads those of containers.

    Element out: `ImageRef` or `EncodedImage` for each distinct image, or a `DeadLetter`. Bounded. At least once, as the runner
    retries bundles. Only names are shuffled, never images' bytes.

    Args:
      inputs: Files, folders, globs (`**` matches any number of folders, also none), manifests, TFRecord files, archives,
        videos; local or `gs://`.
      read: How to read containers; `DetectObjects` has such settings of its own, for the images of files.
      exclude: The job's output. This program's own files there, and in results folders below an input, are skipped.
      allowed: Folders below which lists that a glob names may name images, beside the folders of the inputs.
      done: The rows that count as done, whose images are skipped; None: none do.
      again: Replays the dead letters of a results folder, too.
      worker_context: What remote workers must reach before they begin; None: the launcher's process does all.
      max_megapixels: Videos of larger frames are refused.
      rebalance: Whether to spread the names over the workers again after doubles are dropped. Else the worker that drops the
        doubles of a partition reads all of its images.
    """

    inputs: Sequence[str]
    read: ReadConfig = dataclasses.field(default_factory=ReadConfig)
    exclude: str = ""
    allowed: Sequence[str] = ()
    done: DoneRows | None = None
    again: DeadLetterReplay | None = None
    worker_context: WorkerContext | None = None
    max_megapixels: float = MAX_MEGAPIXELS
    rebalance: bool = True

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, begin: beam.pvalue.PBegin) -> ReadOutputs:
        """Wires listing, dropping of doubles, and opening, in one line: a Flatten would make the runner keep all images.

        Where no image can be named twice, there is no shuffle of names, and images leave while the listing goes on.
        """
        disjoint = not self.again and are_disjoint(self.inputs, remote=self.rebalance)
        at_once = None if disjoint and not self.rebalance else MAX_PARALLEL  # what links lead to is known within a group
        find = beam.FlatMap(_find_folders, self.inputs, self.again.output if self.again else "", at_once)
        pieces = begin | "Start" >> beam.Impulse() | "FindFolders" >> find
        spread = pieces | "SpreadFolders" >> beam.GroupByKey()  # Flink leaves out a Reshuffle that comes after another one
        source = dataclasses.replace(self, allowed=(*self.allowed, *folders_of(self.inputs)))
        listing = _ListGroups(source) if disjoint else _ListImages(source)
        listed = spread | "ListImages" >> beam.ParDo(listing).with_outputs("dead", "counted", main="refs")
        groups, counted = listed.refs, [listed.counted]
        if not disjoint:
            gathered = listed.refs | "GatherDoubles" >> beam.GroupByKey()
            distinct = gathered | "DropDoubles" >> beam.ParDo(_DropDoubles(source)).with_outputs("counted", main="groups")
            groups, counted = distinct.groups, [listed.counted, distinct.counted]
        groups = groups | "SpreadImages" >> beam.Reshuffle() if self.rebalance else groups
        opened = groups | "OpenContainers" >> beam.ParDo(_OpenContainers(source)).with_outputs("dead", "counted", main="images")
        return ReadOutputs(
            opened.images,
            (listed.dead, opened.dead) | "AllUnread" >> beam.Flatten(),
            (*counted, opened.counted) | "AllCounted" >> beam.Flatten(),
        )


def _find_folders(_start: bytes, patterns: Sequence[str], output: str, at_once: int | None) -> Iterator[tuple[int, _Place]]:
    """The places of all inputs, each with the number of the group that one worker reads side by side."""
    for number, piece in enumerate(chain(pieces_of(patterns), [name_bytes(output)] if output else [])):
        yield number // at_once if at_once else 0, piece


class _Counting(beam.DoFn):
    """A step of `ReadImages` that outputs the count of each bundle when it ends."""

    def __init__(self, source: ReadImages):
        self._source = source

    def start_bundle(self) -> None:
        self._stats = JobStats()

    def _count(self, images: int = 1) -> None:
        self._stats.read += images
        beam_metrics.count_read(images)

    def _skip(self, images: int = 1) -> None:
        self._stats.skipped += images
        beam_metrics.count_skipped(images)

    def _skip_done(self, found: np.ndarray) -> None:
        """Counts the images that an earlier run or a stream has done, by what became of each."""
        done, failed = int((found != NEW).sum()), int((found == FAILED).sum())
        self._stats.done += done
        self._stats.done_dead += failed
        self._skip(done)

    def _leave_out(self, kind: str) -> None:
        self._count()
        self._stats.leave_out(kind)
        self._skip()

    def _dead(self, letter: DeadLetter) -> Any:
        beam_metrics.count_results(letter)
        return beam.pvalue.TaggedOutput("dead", letter)

    def finish_bundle(self) -> Iterator[Any]:
        counted = GlobalWindows.windowed_value_at_end_of_window(self._stats)
        yield beam.pvalue.TaggedOutput("counted", counted)


@beam.typehints.with_output_types(tuple[int, ImageRef])
class _ListImages(_Counting):
    """Lists groups of places, without own files and other non-images, and the images of dead letters.

    Images that are listed with their generation and are done go no further; so a run with little to do shuffles little.
    """

    def setup(self) -> None:
        if self._source.worker_context:
            self._source.worker_context.check_worker()

    def process(self, group: tuple[int, Iterable[_Place]]) -> Iterator[Any]:
        for each in self._counted(group[1]):
            is_new = isinstance(each, ImageRef)
            yield (identity_hash(archive_of(each.uri) or each.uri) % _PARTITIONS, each) if is_new else each

    def _counted(self, group: Iterable[_Place]) -> Iterator[Any]:
        """The images to detect in, and the dead letters as such an output."""
        for each in self._found(group):
            if isinstance(each, DeadLetter):
                self._count()
                yield self._dead(each)
            else:
                self._count(not _holds_images(each.uri))
                yield each

    def _found(self, group: Iterable[_Place]) -> Iterator[ImageRef | DeadLetter]:
        source, group = self._source, list(group)
        if source.again and name_bytes(source.again.output) in group:
            yield from self._new(source.again.refs_in_results())
        pieces = [piece for piece in group if not isinstance(piece, bytes)]
        yield from list_pieces(pieces, source.exclude, self._leave_out, source.allowed, self._new)

    def _new(self, found: Iterator[_Found]) -> Iterator[_Found]:
        """Those of files, images or dead letters that are not done; the others are counted."""
        at_once = _GROUP_IMAGES  # the first ones, so that detecting begins
        while some := list(islice(found, at_once)):
            at_once = _AT_ONCE
            PROCESS.check_stopped()
            if not self._source.done:
                yield from some
                continue
            outcomes = self._source.done.have(list(map(_identity, some)))
            self._count(int((outcomes != NEW).sum()))
            self._skip_done(outcomes)
            yield from compress(some, outcomes == NEW)


@beam.typehints.with_output_types(list[ImageRef])
class _ListGroups(_ListImages):
    """The same where no image can be named twice: its groups, as those of `_DropDoubles`, leave at once."""

    def process(self, group: tuple[int, Iterable[_Place]]) -> Iterator[Any]:
        files: list[ImageRef] = []
        for found in self._counted(group[1]):
            if not isinstance(found, ImageRef):
                yield found
            elif _holds_images(found.uri):
                yield [found]
            else:
                files.append(found)
            if len(files) == _GROUP_IMAGES:
                yield files
                files = []
        if files:
            yield files


@beam.typehints.with_output_types(list[ImageRef])
class _DropDoubles(_Counting):
    """Outputs the name of each image and TFRecord file once, unless it is done.

    Names leave in groups of a bounded size, which are cheaper to shuffle. A TFRecord file is a group: it is as much work as
    thousands of images. So are all names of members of one archive, which are read in one pass.
    """

    def setup(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_PARALLEL, "ask-generation")  # its threads start when they are needed

    def teardown(self) -> None:
        self._pool.shutdown()

    def process(self, partition: tuple[int, Iterable[ImageRef]]) -> Iterator[list[ImageRef]]:
        best: dict[str, ImageRef] = {}
        doubles = 0
        for ref in partition[1]:
            doubles += ref.uri in best and not _holds_images(ref.uri)
            best[ref.uri] = max(best.get(ref.uri, ref), ref, key=_PREFERENCE)
        containers = defaultdict[str, list[ImageRef]](list)
        for uri in [uri for uri in best if _holds_images(uri)]:
            containers[archive_of(uri) or uri].append(best.pop(uri))
        yield from containers.values()
        outcomes = np.full(len(best), NEW)
        if self._source.done:
            outcomes = self._source.done.among([*best.values()], self._pool)
        self._skip(doubles)
        self._skip_done(outcomes)
        new = compress(best.values(), outcomes == NEW)
        while group := list(islice(new, _GROUP_IMAGES)):
            yield group


def _identity(found: FoundFile | ImageRef | DeadLetter) -> tuple[str, str]:
    """The URI and the generation of what was found."""
    if isinstance(found, FoundFile):
        return found.path, found.generation
    ref = found.ref if isinstance(found, DeadLetter) else found
    return ref.uri, ref.generation


def _holds_images(name: str) -> bool:
    """Whether a name is that of what holds images: a container, or dead letters."""
    return is_container(name) or are_letters(name)


class _OpenContainers(_Counting):
    """Replaces a container or dead letters by their images, without those that are done; other images pass.

    A container of which all images are done is not opened: `pipeline.results.contents` knows what it holds.
    """

    def start_bundle(self) -> None:
        super().start_bundle()
        self._contents: list[Contents] = []

    def process(self, group: Sequence[ImageRef]) -> Iterator[Any]:
        refs = [replace(ref, generation="") for ref in group]  # the newest one is read
        if are_letters(refs[0].uri) and self._source.again:
            yield from self._new_of(self._source.again.open(), self._source.done)
        elif not is_container(refs[0].uri):  # what holds images is a group of its own
            yield from refs
        elif len(refs) > 1 or file_of(refs[0].uri) != refs[0].uri or not self._source.done:
            images = images_in(refs[0], self._source.read, self._source.max_megapixels, refs[1:])
            yield from self._new_of(images, self._done_in(refs[0].uri))
        else:
            yield from self._whole(group[0], self._source.done)

    def finish_bundle(self) -> Iterator[Any]:
        if self._contents and self._source.done:
            write_contents(self._source.done.output, self._source.done.run, self._contents)
        yield from super().finish_bundle()

    def _whole(self, listed: ImageRef, done: DoneRows) -> Iterator[Any]:
        """The new images of a whole container; notes what it holds, unless something in it may be readable another time."""
        ref, done = replace(listed, generation=""), self._done_in(listed.uri) or done
        key = done.key_of_whole(
            listed, reading(ref.uri, self._source.read)
        )  # before it is read: the next run reads what replaces it now
        if known := done.known(key):
            self._count(sum(known.outcomes.values()))
            self._skip_done(np.repeat(np.array([*known.outcomes], np.uint8), [*known.outcomes.values()]))
            for kind, members in known.left_out.items():
                for _ in range(members):
                    self._leave_out(kind)
            return
        keys, left_out, passing = array("Q"), Counter[str](), False

        def noted() -> Iterator[EncodedImage | DeadLetter | str]:
            nonlocal passing
            for image in images_in(ref, self._source.read, self._source.max_megapixels):
                if isinstance(image, str):
                    left_out[kind_of(image)] += 1
                else:
                    keys.append(int(done.key_of(image.ref)))
                    passing = passing or (isinstance(image, DeadLetter) and image.reason not in FOR_GOOD)
                yield image

        yield from self._new_of(noted(), done)
        if key and not passing:
            self._contents.append(Contents(key, ref.uri, np.array(keys, "<u8").tobytes(), dict(left_out)))

    def _done_in(self, container: str) -> DoneRows | None:
        """The rows that count for the images of a container; those of a TFRecord file may have any name."""
        done = self._source.done
        return done._replace(prefixes=("",)) if done and record_range(container) else done

    def _new_of(self, images: Iterable[EncodedImage | DeadLetter | str], done: DoneRows | None) -> Iterator[Any]:
        """Those that are not done; the others, and members that are no images, are counted."""
        for image in images:
            PROCESS.check_stopped()
            if isinstance(image, str):
                self._leave_out(kind_of(image))
                continue
            self._count()
            if done and (outcome := done.among([image.ref]))[0] != NEW:
                self._skip_done(outcome)
            else:
                yield image if isinstance(image, EncodedImage) else self._dead(image)
