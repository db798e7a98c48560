"""What of a listing has a result, what has none, and what has one too many: the listing and the ledger side by side.

Both are written as sorted spills under their images' names and merged, so that all that is known of one image comes together, and
memory stays that of one spill however many there are.

Each image that is listed has one status:

- done: a row of the version that is listed (of any version, where a manifest names none)
- dead: no row, but a dead letter of this version, or one that does not say of which
- stale: rows of other versions only
- missing: none of these

Beside that, doubled: a generation of an image has several rows by one model version; orphaned: rows of an image that the inputs'
patterns would name, if it were still there.
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

from pipeline.failures import FOR_GOOD
from pipeline.read.list_images import list_images
from pipeline.read.manifests import is_manifest
from pipeline.read.tfrecords import is_tfrecord
from pipeline.records import row_bytes
from pipeline.storage.ledger import list_files_of_rows, read_entries
from pipeline.storage.listing import listing_backend_of
from pipeline.storage.listing_backends import ListingBackend
from pipeline.storage.results import DETECTIONS
from pipeline.storage.spill_files import SpillFile, SpillWriter, merge_spills

STATUSES = ("done", "dead", "stale", "missing")
BESIDE = ("doubled", "orphaned")
_EXAMPLES = 5
_LISTED, _ROW, _LETTER = 0, 1, 2
_DAY = re.compile(r"(?<!\d)((?:19|20)\d\d)[-_/]?([01]\d)[-_/]?([0-3]\d)(?!\d)")


class Found(NamedTuple):
    """One image with its status.

    Attributes:
      status: One of `STATUSES` or `BESIDE`.
      uri: The image.
      generation: The version that is listed; of what is not listed, that of a row.
      reason: Of dead ones, why.
    """

    status: str
    uri: str
    generation: str
    reason: str = ""


@dataclasses.dataclass
class Reconciled:
    """The outcome.

    Attributes:
      counts: Images by status, those of `BESIDE` too.
      examples: A few of each.
      days: Images by day (`2026-11-20`; empty where none is known) and status.
      reasons: Dead ones by reason.
      left_out: TFRecord files that were listed: what is in them is not looked at.
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
        """How many are dead for a transient reason."""
        return sum(count for reason, count in self.reasons.items() if reason not in FOR_GOOD)

    @property
    def is_complete(self) -> bool:
        """Whether a run with `--only-new` would find nothing to do: each image is done, or permanently dead."""
        return not (self.counts["missing"] or self.counts["stale"] or self.is_transient)

    def add(self, found: Found) -> None:
        """Counts one."""
        self.counts[found.status] += 1
        examples = self.examples.setdefault(found.status, [])
        if len(examples) < _EXAMPLES:
            examples.append(found)
        if found.reason:
            self.reasons[found.reason] += 1
        if found.status in STATUSES:
            self.days[day_of(found.uri, found.generation), found.status] += 1


def reconcile(
    patterns: Sequence[str], output: str, model: tuple[str, str] | None = None, tell: Callable[[Found], None] | None = None
) -> Reconciled:
    """Compares what inputs name with the rows in a results folder.

    Args:
      patterns: Files, folders, globs, manifests, as `--input` takes them.
      output: The results folder or archive, local or `gs://`.
      model: Name and version: rows of others do not count; None: those of all do.
      tell: Called for each image with its status, sorted by name.

    Raises:
      InputError: An input cannot be listed.
    """
    outcome, scope = Reconciled(), _Scope(patterns)
    with tempfile.TemporaryDirectory(prefix="reconcile-") as folder:
        spills = _spilled(_all_lines(patterns, output, model, outcome), folder)
        lines = map(json.loads, merge_spills(spills, folder))
        for uri, known in groupby(lines, lambda line: line[0]):
            for found in _statuses(uri, known, scope):
                outcome.add(found)
                if tell:
                    tell(found)
    return outcome


def day_of(uri: str, generation: str) -> str:
    """The day of an image: as its name says it, else that of its generation; empty where neither does.

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
    """Which images the inputs would name, by their patterns."""

    def __init__(self, patterns: Iterable[str]):
        self._places: list[ListingBackend] = [listing_backend_of(pattern) for pattern in patterns if not is_manifest(pattern)]

    def has(self, uri: str) -> bool:
        for number, place in enumerate(self._places):
            if uri.startswith(place.folder) and place.matches(uri[len(place.folder) :]):
                self._places.insert(0, self._places.pop(number))  # the next one mostly lies there, too
                return True
        return False


def _all_lines(patterns: Sequence[str], output: str, model: tuple[str, str] | None, outcome: Reconciled) -> Iterator[list[Any]]:
    """What is known of each image, in no order: its name, what knows it, and that."""
    for ref in list_images(patterns, output):
        if is_tfrecord(ref.uri):
            outcome.left_out += 1
        else:
            yield [ref.uri, _LISTED, ref.generation, "", ""]
    for file in list_files_of_rows(output):
        kind = _ROW if file.kind == DETECTIONS else _LETTER
        for entry in read_entries(file):
            of_model = (entry.model, entry.version)
            if model is None or of_model == model or (kind == _LETTER and not any(of_model)):
                yield [entry.uri, kind, entry.generation, entry.reason, "/".join(of_model)]


def _spilled(lines: Iterable[list[Any]], folder: str) -> list[SpillFile]:
    spiller, spills = SpillWriter(folder), []
    for line in lines:
        spills += [spill for _, spill in spiller.add(None, row_bytes(line) + b"\n")]
    return spills + [spill for _, spill in spiller.flush()]


def _statuses(uri: str, known: Iterable[list[Any]], scope: _Scope) -> Iterator[Found]:
    """The status of one image, and what is wrong beside it."""
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
    """The status of an image that is listed."""
    if listed in rows or (rows and not listed):
        return Found("done", uri, listed)
    for generation in (listed, "") if listed else letters:
        if generation in letters:
            return Found("dead", uri, listed, letters[generation])
    return Found("stale" if rows else "missing", uri, listed)
