"""`detect-objects reconcile`, `python -m pipeline.reconcile`: which images have a result, and which have none.

    detect-objects reconcile --input 'gs://cams/raw/**' --output gs://cams/detections [--model …] [--write-missing FILE.jsonl]

Compares the listing of inputs with the rows of a results folder, and prints a table. Each listed image has one status:

- done: a row of the listed generation (of any generation, if a manifest names none)
- dead: no row, but a dead letter of this generation, or of an unknown one
- stale: rows of other generations only
- missing: none of these

On top come `orphaned` images: those with rows that the inputs' patterns would name, but that are gone. Rows count whatever their
settings were; with `--model` only those of this model version do.

Memory holds hashes: 8 bytes for each listed image, 16 for each row, and two entries of a dictionary for each dead letter.

Exit code 0: complete, each listed image is done or permanently dead; 1: it is not, or storage does not answer; 2: a wrong
command or place; 130: stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import posixpath
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, islice
from typing import Any, NamedTuple

import numpy as np

from models.progress import shown
from pipeline.config import ReadConfig, load_config
from pipeline.config.paths import local_path
from pipeline.detect.load_model import name_and_version
from pipeline.errors import CommandParser, ConfigError, InputError, run_command
from pipeline.failures import FOR_GOOD
from pipeline.log_lines import say
from pipeline.read.containers import images_in
from pipeline.read.list_images import check_inputs, list_images
from pipeline.read.manifests import is_manifest
from pipeline.read.names import file_of, is_container, record_range
from pipeline.records import DeadLetter, ImageRef, identity_hash, row_bytes
from pipeline.results.completion import contains
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, check_output, results_folder
from pipeline.results.reader import ResultsFolder, undisturbed
from pipeline.results.rows import uri_of
from pipeline.storage.files import UNFINISHED, create, delete_files, move_files
from pipeline.storage.listing import location_of

COMPLETE, INCOMPLETE = 0, 1
STATUSES = ("done", "dead", "stale", "missing")
ORPHANED = "orphaned"
LEFT_OUT = "left out"  # a TFRecord file, whose content is not read
_WRITTEN = ("missing", "dead", "stale", ORPHANED)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = make_parser().parse_args(argv)
    return run_command(lambda: _run(flags), "the reconciliation failed")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog="detect-objects reconcile",
        description="Says which images have a result and which have none.",
        epilog="exit code: 0 complete; 1 images are missing, stale, or dead for a transient reason; 2 wrong command or place",
    )
    add = parser.add_argument
    text = "YAML file of a job: its input, output and dates count"
    add("--config", action="append", default=[], metavar="FILE", help=text)
    add("--input", nargs="+", action="extend", metavar="PATTERN", help="the images, as a job takes them")
    add("--output", metavar="FOLDER", help="the results folder or archive, local or gs://")
    add("--dates", help="days for which {date} in an input stands")
    add("--fps", help="the frames of a second of video that the job read; default: 1")
    add("--model", metavar="PATH", help="count only rows of this model version; default: of any")
    for name in _WRITTEN:
        text = f"write the {name} images to a manifest, which a job takes as --input"
        add(f"--write-{name}", metavar="FILE.jsonl", help=text)
    return parser


def _run(flags: argparse.Namespace) -> int:
    given = {"input": flags.input, "output": flags.output, "dates": flags.dates, "read.fps": flags.fps, "model.path": flags.model}
    config = load_config(flags.config, {name: value for name, value in given.items() if value})
    if not config.output or "/topics/" in config.output:
        raise ConfigError("no output: expected --output with a results folder or archive, local or gs://")
    check_inputs(config.patterns(), allow_empty=True)
    model = name_and_version(config.model, config.detect.engine) if flags.model else None
    paths = {name: local_path(path) for name in _WRITTEN if (path := getattr(flags, f"write_{name}"))}
    check_output(output := results_folder(config.output), write=False)
    # manifests get their names when all is compared
    staged = {name: posixpath.join(posixpath.dirname(path), UNFINISHED + uuid.uuid4().hex[:12]) for name, path in paths.items()}

    def compare() -> Reconciled:
        with contextlib.ExitStack() as stack:
            files = {status: stack.enter_context(create(name)) for status, name in staged.items()}

            def write(found: Found) -> None:
                if found.status in files:
                    row = {"uri": found.uri, **({"generation": found.generation} if found.generation else {})}
                    files[found.status].write(row_bytes(row) + b"\n")

            return reconcile(config.all_patterns(), output, model, write, read=config.read)

    try:
        outcome = undisturbed(compare)
        if not (outcome.counts or config.allow_empty):
            raise InputError(
                f"input {', '.join(config.input)}: names no image, and no row is of one that is gone; check the path"
            )
        move_files({staged[status]: path for status, path in paths.items()})
    finally:
        delete_files(staged.values())
    say(_table(outcome))
    return COMPLETE if outcome.is_complete else INCOMPLETE


def _table(outcome: Reconciled) -> Iterator[str]:
    """What there is, with a few examples of what is wrong."""
    yield f"{outcome.listed:>11,} listed"
    for status in (*STATUSES, ORPHANED):
        note = f" ({outcome.transient:,} of them for a transient reason)" if status == "dead" and outcome.transient else ""
        yield f"{outcome.counts[status]:>11,} {status}{note}"
        for found in outcome.examples.get(status, ()) if status != "done" else ():
            yield f"            {found.uri}{f'  {found.reason}' if found.reason else ''}"
    if outcome.counts[LEFT_OUT]:
        yield f"{outcome.counts[LEFT_OUT]:>11,} TFRecord files left out: what is in them is not looked at"
    yield "complete" if outcome.is_complete else "not complete: the same job does what is missing or stale"


def reconcile(
    patterns: Sequence[str],
    output: str,
    model: tuple[str, str] | None = None,
    write: Callable[[Found], None] = lambda _found: None,
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
        outcome.counts[found.status] += 1
        outcome.transient += found.status == "dead" and found.reason not in FOR_GOOD
        if len(examples := outcome.examples.setdefault(found.status, [])) < _EXAMPLES:
            examples.append(found)
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
        for ref, wanted, has_row, is_done in compress(facts, _add(seen, images)):  # several inputs may name one image
            letter = letters.get(wanted) or letters.get(_hash(ref.uri, ""))
            if record_range(ref.uri):
                yield Found(LEFT_OUT, ref.uri)
            elif letter and not is_done:
                yield Found("dead", ref.uri, ref.generation, letter[1])
            else:
                yield Found("done" if is_done else "stale" if has_row else "missing", ref.uri, ref.generation)
    places = [location_of(pattern) for pattern in patterns if not is_manifest(pattern)]
    detected = _rows(output, DETECTIONS, model) if places else iter(())
    while pairs := list(islice(detected, _AT_ONCE)):
        for uri, row in compress(pairs, _add(seen, np.fromiter((_hash(uri) for uri, _ in pairs), np.uint64, len(pairs)))):
            file = file_of(uri)
            if any(file.startswith(place.folder) and place.matches(file[len(place.folder) :]) for place in places):
                yield Found(ORPHANED, uri, row["generation"])


def _listed(patterns: Sequence[str], output: str, read: ReadConfig) -> Iterator[ImageRef]:
    """The listed images, and those of listed archives and videos, which are read for it."""
    for ref in list_images(patterns, output):
        if isinstance(ref, DeadLetter):
            continue
        if is_container(ref.uri) and not record_range(ref.uri):
            yield from (image.ref for image in images_in(ref, read) if not isinstance(image, str))
        else:
            yield ref


def _rows(output: str, kind: str, model: tuple[str, str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a kind with their images, without those of other models."""
    columns = ["uri", "uri_bytes", "generation", "model", "version", *(["reason", "made_at"] if kind == DEAD_LETTERS else [])]
    for _, batch in ResultsFolder(output, (kind,)).batches(columns=columns):
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


if __name__ == "__main__":
    sys.exit(main())
