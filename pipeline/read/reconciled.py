"""Compares the listing of inputs with the rows of a results folder: which images have a result, and which have none.

Memory holds hashes: 8 bytes for each listed image, 16 for each row, and two entries of a dictionary for each dead letter.

Each listed image has one status:

- done: a row of the listed generation (of any generation, if a manifest names none)
- dead: no row, but a dead letter of this generation, or of an unknown one
- stale: rows of other generations only
- missing: none of these

On top come `orphaned` images: those with rows that the inputs' patterns would name, but that are gone.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, islice
from typing import Any, NamedTuple

import numpy as np

from models.progress import shown
from pipeline.config import ReadConfig
from pipeline.failures import FOR_GOOD
from pipeline.read.containers import file_of, images_in, is_container
from pipeline.read.list_images import list_images
from pipeline.read.manifests import is_manifest
from pipeline.read.tfrecords import is_tfrecord
from pipeline.records import DeadLetter, ImageRef, identity_hash
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.rows import uri_of
from pipeline.results.shards import contains, list_shards, read_batches
from pipeline.storage.listing import listing_backend_of

STATUSES = ("done", "dead", "stale", "missing")
ORPHANED = "orphaned"
LEFT_OUT = "left out"  # a TFRecord file, whose content is not read
_EXAMPLES = 5
_AT_ONCE = 65_536  # images


class Found(NamedTuple):
    """One image with its status.

    Attributes:
      status: One of `STATUSES`, `ORPHANED`, or `LEFT_OUT`.
      uri: The image.
      generation: The listed one; of an orphaned image, that of a row.
      reason: Why a dead image has no row.
    """

    status: str
    uri: str
    generation: str = ""
    reason: str = ""


@dataclasses.dataclass
class Reconciled:
    """The outcome.

    Attributes:
      counts: Images by status, orphaned ones too.
      examples: A few images of each status.
      transient: How many images failed for a transient reason.
    """

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    examples: dict[str, list[Found]] = dataclasses.field(default_factory=dict)
    transient: int = 0

    @property
    def listed(self) -> int:
        """How many images are listed."""
        return sum(self.counts[status] for status in STATUSES)

    @property
    def is_complete(self) -> bool:
        """Whether each image is done or has failed permanently, so that a run would have nothing to do."""
        return not (self.counts["missing"] or self.counts["stale"] or self.transient)

    def add(self, found: Found) -> None:
        """Counts one finding."""
        self.counts[found.status] += 1
        self.transient += found.status == "dead" and found.reason not in FOR_GOOD
        if len(examples := self.examples.setdefault(found.status, [])) < _EXAMPLES:
            examples.append(found)


def reconcile(
    patterns: Sequence[str],
    output: str,
    model: tuple[str, str] | None = None,
    write: Callable[[Found], None] | None = None,
    *,
    read: ReadConfig | None = None,
) -> Reconciled:
    """Compares the images that inputs name with the rows in a results folder.

    Args:
      patterns: Files, folders, globs, manifests, as `--input` takes them.
      output: The results folder or archive, local or `gs://`.
      model: Name and version: rows of others do not count; None: those of all do.
      write: Called for each image with its status, in the order of the listing.
      read: How images were read; it decides which frames of a video are listed.

    Raises:
      InputError: An input cannot be listed.
      FileNotFoundError: A compaction has deleted a shard meanwhile; begin anew.
    """
    outcome = Reconciled()
    for found in _findings(patterns, output, model, read or ReadConfig()):
        outcome.add(found)
        if write:
            write(found)
    return outcome


def _findings(patterns: Sequence[str], output: str, model: tuple[str, str] | None, read: ReadConfig) -> Iterator[Found]:
    of_rows = ((_hash(uri), _hash(uri, row["generation"])) for uri, row in _rows(output, DETECTIONS, model))
    known = np.fromiter(of_rows, np.dtype((np.uint64, 2))).ravel()
    known.sort()  # in place: a copy would take as much again
    letters: dict[int, tuple[Any, ...]] = {}  # the newest count
    for uri, row in _rows(output, DEAD_LETTERS, model):
        for each in (_hash(uri), _hash(uri, row["generation"])):
            letters[each] = max(letters.get(each, ()), (row["made_at"], row["reason"]))
    seen: list[np.ndarray] = []
    refs = shown(_listed(patterns, output, read), "comparing", "images")
    while some := list(islice(refs, _AT_ONCE)):
        images = np.fromiter((_hash(ref.uri) for ref in some), np.uint64, len(some))
        exact = np.fromiter((_hash(ref.uri, ref.generation or None) for ref in some), np.uint64, len(some))
        facts = zip(some, exact.tolist(), contains(known, images), contains(known, exact), strict=True)
        for ref, wanted, *of_ref in compress(facts, _add(seen, images)):  # several inputs may name one image
            yield _status(ref, letters.get(wanted) or letters.get(_hash(ref.uri, ""), ()), *of_ref)
    places = [listing_backend_of(pattern) for pattern in patterns if not is_manifest(pattern)]
    gone = _rows(output, DETECTIONS, model) if places else iter(())
    while pairs := list(islice(gone, _AT_ONCE)):
        for uri, row in compress(pairs, _add(seen, np.fromiter((_hash(uri) for uri, _ in pairs), np.uint64, len(pairs)))):
            file = file_of(uri)
            if any(file.startswith(place.folder) and place.matches(file[len(place.folder) :]) for place in places):
                yield Found(ORPHANED, uri, row["generation"])


def _status(ref: ImageRef, letter: tuple[Any, ...], has_row: bool, is_exact: bool) -> Found:
    """The status of a listed image."""
    if is_tfrecord(ref.uri):
        return Found(LEFT_OUT, ref.uri)
    if is_exact:
        return Found("done", ref.uri, ref.generation)
    if letter:
        return Found("dead", ref.uri, ref.generation, letter[1])
    return Found("stale" if has_row else "missing", ref.uri, ref.generation)


def _listed(patterns: Sequence[str], output: str, read: ReadConfig) -> Iterator[ImageRef]:
    """The listed images, and those of listed archives and videos, which are read for it."""
    for ref in list_images(patterns, output):
        if isinstance(ref, DeadLetter):
            continue
        if is_container(ref.uri) and not is_tfrecord(ref.uri):
            yield from (image.ref for image in images_in(ref, read) if not isinstance(image, str))
        else:
            yield ref


def _rows(output: str, kind: str, model: tuple[str, str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a kind with their images, without those of other models."""
    columns = ["uri", "uri_bytes", "generation", "model", "version", *(["reason", "made_at"] if kind == DEAD_LETTERS else [])]
    for batch in (batch for shard in list_shards(output, (kind,)) for batch in read_batches(shard, columns)):
        for row in batch.to_pylist():
            of_row = (row["model"], row["version"])
            if model is None or of_row == model or (kind == DEAD_LETTERS and not any(of_row)):
                yield uri_of(row), row


def _hash(uri: str, generation: str | None = None) -> int:
    return identity_hash(uri if generation is None else f"{uri}\0{generation}")


def _add(seen: list[np.ndarray], hashes: np.ndarray) -> np.ndarray:
    """Adds hashes to sorted arrays of doubling sizes; returns which are new, of equal ones the first, `(N,) bool`."""
    new = np.zeros(len(hashes), bool)
    new[np.unique(hashes, return_index=True)[1]] = True
    for part in seen:
        new &= ~contains(part, hashes)
    seen.append(np.sort(hashes[new]))
    while len(seen) > 1 and len(seen[-2]) <= 2 * len(seen[-1]):
        seen[-2:] = [np.sort(np.concatenate(seen[-2:]))]
    return new
