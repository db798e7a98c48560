"""Full outer join of the listing with the ledger, by an external merge sort: which images have a result, and which have none.

The sort brings everything about one image together, and needs the memory of one spill file, however many images there are.

Each listed image has one status:

- done: a row of the listed version (of any version, if a manifest names none)
- dead: no row, but a dead letter of this version, or of an unknown one
- stale: rows of other versions only
- missing: none of these

Two findings come on top. `doubled`: an image generation has several rows of one model version. `orphaned`: rows of an image that
the inputs' patterns would name, but which is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from models.progress import shown
from pipeline.config import ReadConfig
from pipeline.failures import FOR_GOOD
from pipeline.read.containers import file_of, images_in, is_container
from pipeline.read.list_images import list_images
from pipeline.read.manifests import is_manifest
from pipeline.read.tfrecords import is_tfrecord
from pipeline.records import ImageRef, row_bytes
from pipeline.results.layout import DETECTIONS
from pipeline.results.ledger import list_files_of_rows, read_entries
from pipeline.storage.listing import listing_backend_of
from pipeline.storage.listing_backends import ListingBackend
from pipeline.storage.spill_files import SpillFile, SpillWriter, merge_spills

STATUSES = ("done", "dead", "stale", "missing")
FINDINGS = ("doubled", "orphaned")
_EXAMPLES = 5
_LISTED, _ROW, _LETTER = 0, 1, 2
_DAY = re.compile(r"(?<!\d)((?:19|20)\d\d)[-_/]?([01]\d)[-_/]?([0-3]\d)(?!\d)")


class Found(NamedTuple):
    """One image with its status.

    Attributes:
      status: One of `STATUSES` or `FINDINGS`.
      uri: The image.
      generation: The listed version; if none is listed, that of a row.
      reason: Why a dead image has no row.
    """

    status: str
    uri: str
    generation: str
    reason: str = ""


@dataclasses.dataclass
class Reconciled:
    """The outcome.

    Attributes:
      counts: Images by status, those of `FINDINGS` too.
      examples: A few images of each status.
      days: Images by day (`2026-11-20`; empty where none is known) and status.
      reasons: Dead images by reason.
      left_out: Listed TFRecord files, whose content is not read.
    """

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    examples: dict[str, list[Found]] = dataclasses.field(default_factory=dict)
    days: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)
    left_out: int = 0

    @property
    def listed(self) -> int:
        """How many images are listed."""
        return sum(self.counts[status] for status in STATUSES)

    @property
    def is_transient(self) -> int:
        """How many images failed for a transient reason."""
        return sum(count for reason, count in self.reasons.items() if reason not in FOR_GOOD)

    @property
    def is_complete(self) -> bool:
        """Whether each image is done or has failed permanently, so that `--only-new` would have nothing to do."""
        return not (self.counts["missing"] or self.counts["stale"] or self.is_transient)

    def add(self, found: Found) -> None:
        """Counts one finding."""
        self.counts[found.status] += 1
        examples = self.examples.setdefault(found.status, [])
        if len(examples) < _EXAMPLES:
            examples.append(found)
        if found.reason:
            self.reasons[found.reason] += 1
        if found.status in STATUSES:
            self.days[day_of(found.uri, found.generation), found.status] += 1


def reconcile(
    patterns: Sequence[str],
    output: str,
    model: tuple[str, str] | None = None,
    write: Callable[[Found], None] | None = None,
    spill_bytes: int = 0,
    *,
    read: ReadConfig | None = None,
) -> Reconciled:
    """Compares the images that inputs name with the rows in a results folder.

    Args:
      patterns: Files, folders, globs, manifests, as `--input` takes them.
      output: The results folder or archive, local or `gs://`.
      model: Name and version: rows of others do not count; None: those of all do.
      write: Called for each image with its status, sorted by name.
      spill_bytes: Bytes of lines that are held in memory; 0: the default of `SpillWriter`.
      read: How images were read; it decides which frames of a video are listed.

    Raises:
      InputError: An input cannot be listed.
    """
    outcome, scope = Reconciled(), _Scope(patterns)
    with tempfile.TemporaryDirectory(prefix="reconcile-") as folder:
        lines = _all_lines(patterns, output, model, outcome, read or ReadConfig())
        spills = _spilled(shown(lines, "listing", "images and rows"), folder, spill_bytes)
        merged = shown(merge_spills(spills, folder), "comparing", "images and rows", sum(spill.lines for spill in spills))
        for uri, known in groupby(map(json.loads, merged), lambda line: line[0]):
            for found in _statuses(uri, known, scope):
                outcome.add(found)
                if write:
                    write(found)
    return outcome


def day_of(uri: str, generation: str) -> str:
    """The day in an image's name, else that of its generation; empty if neither has one.

    >>> day_of("gs://b/raw/2026/11/20/a.jpg", ""), day_of("cam-20261120.jpg", ""), day_of("a.jpg", "1795226400500000")
    ('2026-11-20', '2026-11-20', '2026-11-21')
    >>> day_of("a.jpg", "1234-1795226400500000000"), day_of("9999999999.jpg", "")
    ('2026-11-21', '')
    """
    for year, month, day in _DAY.findall(uri):
        with contextlib.suppress(ValueError):
            return str(datetime.date(int(year), int(month), int(day)))
    time, unit = (generation.rpartition("-")[2], 1e9) if "-" in generation else (generation, 1e6)  # local files, Cloud Storage
    if time.isdecimal() and 1e8 < int(time) / unit < 1e10:
        return datetime.datetime.fromtimestamp(int(time) / unit, datetime.timezone.utc).date().isoformat()
    return ""


class _Scope:
    """Which images the inputs' patterns match."""

    def __init__(self, patterns: Iterable[str]):
        self._places: list[ListingBackend] = [listing_backend_of(pattern) for pattern in patterns if not is_manifest(pattern)]

    def has(self, uri: str) -> bool:
        uri = file_of(uri)
        for number, place in enumerate(self._places):
            if uri.startswith(place.folder) and place.matches(uri[len(place.folder) :]):
                self._places.insert(0, self._places.pop(number))  # the next one mostly lies there, too
                return True
        return False


def _all_lines(
    patterns: Sequence[str], output: str, model: tuple[str, str] | None, outcome: Reconciled, read: ReadConfig
) -> Iterator[list[Any]]:
    """Every fact about each image, unsorted: its name, the source, and the fact."""
    for ref in list_images(patterns, output):
        if is_tfrecord(ref.uri):
            outcome.left_out += 1
            continue
        for each in _refs_in(ref, read):
            yield [each.uri, _LISTED, each.generation, "", ""]
    for file in list_files_of_rows(output):
        kind = _ROW if file.kind == DETECTIONS else _LETTER
        for entry in read_entries(file):
            of_model = (entry.model, entry.version)
            if model is None or of_model == model or (kind == _LETTER and not any(of_model)):
                yield [entry.uri, kind, entry.generation, entry.reason, "/".join(of_model)]


def _refs_in(ref: ImageRef, read: ReadConfig) -> Iterator[ImageRef]:
    """A listed image, or those of an archive or video, which are read for it."""
    if not is_container(ref.uri):
        yield ref
        return
    for image in images_in(ref, read):
        if not isinstance(image, str):
            yield image.ref


def _spilled(lines: Iterable[list[Any]], folder: str, most_bytes: int) -> list[SpillFile]:
    spiller, spills = SpillWriter(folder, most_bytes), []
    for line in lines:
        spills += [spill for _, spill in spiller.add(None, row_bytes(line) + b"\n")]
    return spills + [spill for _, spill in spiller.flush()]


def _statuses(uri: str, known: Iterable[list[Any]], scope: _Scope) -> Iterator[Found]:
    """The status of one image, and the findings on top."""
    listed, rows, letters = "", Counter[tuple[str, str]](), dict[str, str]()
    is_listed = False
    for _, kind, generation, reason, of_model in known:
        if kind == _LISTED:
            is_listed, listed = True, max(listed, generation)
        elif kind == _ROW:
            rows[generation, of_model] += 1
        else:
            letters[generation] = reason
    doubled = next((generation for (generation, _), count in rows.items() if count > 1), None)
    if not is_listed:
        if rows and scope.has(uri):
            yield Found("orphaned", uri, max(generation for generation, _ in rows))
        return
    if doubled is not None:
        yield Found("doubled", uri, doubled)
    yield _status(uri, listed, {generation for generation, _ in rows}, letters)


def _status(uri: str, listed: str, rows: set[str], letters: dict[str, str]) -> Found:
    """The status of a listed image."""
    if listed in rows or (rows and not listed):
        return Found("done", uri, listed)
    for generation in (listed, "") if listed else letters:
        if generation in letters:
            return Found("dead", uri, listed, letters[generation])
    return Found("stale" if rows else "missing", uri, listed)
