"""`detect-objects reconcile`: which images have a result, and which have none.

    detect-objects reconcile --config job.yaml [the flags of the job] [--write-missing FILE.jsonl]

It takes the settings of a job, and asks what that job would ask: it lists the inputs, also what is in archives, videos and
TFRecord files, and compares them with the keys of the rows. Each listed image has one status:

- done: a row of this generation, model version and settings
- dead: no row, but a permanent failure of the same
- stale: to be done; rows of this model version and settings are of other generations only
- missing: to be done; none of these

On top come `orphaned` images: those with rows that the inputs' patterns would name, but that are gone.

Memory holds hashes: 16 bytes for each listed image, 24 for each row.

Exit code 0: complete, the job would find nothing new; 1: it is not, or storage does not answer; 2: a wrong command or place; 130:
stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import posixpath
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress, islice
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from models.progress import shown
from pipeline.config import Config, check_model_is_named, load_config
from pipeline.config.flags import add_setting_flags, overrides
from pipeline.config.paths import local_path
from pipeline.detect.load_model import name_and_version
from pipeline.errors import CommandParser, ConfigError, InputError, run_command
from pipeline.log_lines import say
from pipeline.read.containers import images_in
from pipeline.read.done_rows import DETECTED, FAILED, DoneRows
from pipeline.read.list_images import check_inputs, list_images
from pipeline.read.manifests import is_manifest
from pipeline.read.names import file_of, is_container
from pipeline.records import DeadLetter, ImageRef, row_bytes
from pipeline.results.completion import RowVersion, contains, row_keys
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, check_output, results_folder
from pipeline.results.reader import ResultsFolder, undisturbed
from pipeline.results.rows import exact_uris, parquet_text
from pipeline.storage.files import create, move_files, staging
from pipeline.storage.listing import MAX_PARALLEL, Location, location_of

COMPLETE, INCOMPLETE = 0, 1
STATUSES = ("done", "dead", "stale", "missing")
ORPHANED = "orphaned"
_WRITTEN = ("missing", "dead", "stale", ORPHANED)
_EXAMPLES = 5
_AT_ONCE = 65_536  # images

Images = Sequence[tuple[str, str]]
"""Images by URI and generation: the listed one; of orphaned images, that of a row."""


class Reconciled(NamedTuple):
    """The outcome.

    Attributes:
      counts: Images by status, orphaned ones too.
      examples: A few images of each status, each with the reason of its last dead letter, or without one.
    """

    counts: Counter[str]
    examples: dict[str, dict[str, str]]

    @property
    def listed(self) -> int:
        """How many images are listed."""
        return sum(self.counts[status] for status in STATUSES)

    @property
    def is_complete(self) -> bool:
        """Whether the job would find nothing new."""
        return not (self.counts["missing"] or self.counts["stale"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = make_parser().parse_args(argv)
    return run_command(lambda: _run(flags), "the reconciliation failed")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog="detect-objects reconcile",
        usage="detect-objects reconcile [--config FILE] [--input PATTERN [PATTERN ...]] [--output FOLDER] [--model PATH] "
        "[flags of the job] [--write-missing FILE.jsonl]",
        description="Says which images of a job have a result and which have none. It takes the flags of the job.",
        epilog="exit code: 0 complete, the job would find nothing new; 1 images are missing or stale; 2 wrong command or place",
    )
    text = "YAML file of the job; of several the last one wins"
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help=text)
    add_setting_flags(parser)
    for name in _WRITTEN:
        text = f"write the {name} images to a manifest, which a job takes as --input"
        parser.add_argument(f"--write-{name}", metavar="FILE.jsonl", help=text)
    return parser


def _run(flags: argparse.Namespace) -> int:
    config = load_config(flags.config, overrides(flags))
    if not config.output or "/topics/" in config.output:
        raise ConfigError("no output: expected --output with a results folder or archive")
    check_inputs(config.patterns(), allow_empty=True)
    check_model_is_named(config.model, config.detect)
    version = RowVersion.of(config.as_dict(), name_and_version(config.model, config.detect.engine))
    paths = {name: local_path(path) for name in _WRITTEN if (path := getattr(flags, f"write_{name}"))}
    check_output(output := results_folder(config.output), write=False)

    def compare() -> Reconciled:
        with contextlib.ExitStack() as opened:
            files = {status: opened.enter_context(create(name)) for status, name in staged.items()}

            def write(status: str, images: Images) -> None:
                if file := files.get(status):
                    rows = ({"uri": uri, **({"generation": generation} if generation else {})} for uri, generation in images)
                    file.writelines(row_bytes(row) + b"\n" for row in rows)

            return reconcile(config, output, version, write)

    with contextlib.ExitStack() as stack:
        # manifests get their names when all is compared
        staged = {name: f"{stack.enter_context(staging(posixpath.dirname(path)))}/{name}" for name, path in paths.items()}
        outcome = undisturbed(compare)
        if not (outcome.counts or config.allow_empty):
            raise InputError(
                f"input {', '.join(config.input)}: names no image, and no row is of one that is gone; check the path"
            )
        move_files({staged[status]: path for status, path in paths.items()})
    say(_table(outcome))
    return COMPLETE if outcome.is_complete else INCOMPLETE


def _table(outcome: Reconciled) -> Iterator[str]:
    """What there is, with a few examples of what is wrong."""
    yield f"{outcome.listed:>11,} listed"
    for status in (*STATUSES, ORPHANED):
        yield f"{outcome.counts[status]:>11,} {status}"
        for uri, reason in outcome.examples[status].items() if status != "done" else ():
            yield f"            {uri}{f'  {reason}' if reason else ''}"
    yield "complete" if outcome.is_complete else "not complete: the same job does what is missing or stale"


def reconcile(
    config: Config, output: str, version: RowVersion, write: Callable[[str, Images], None] = lambda _status, _images: None
) -> Reconciled:
    """Compares the images that a job's inputs name with the rows in a results folder.

    Args:
      config: The job's settings.
      output: The results folder or archive.
      version: The model, its version and the settings whose rows count.
      write: Called with a status and some of its images, in the order of the listing.

    Raises:
      InputError: An input cannot be listed.
      FileNotFoundError: A compaction has deleted a shard meanwhile; begin anew.
    """
    counts, examples = Counter[str](), {status: dict[str, str]() for status in (*STATUSES, ORPHANED)}
    for status, images in _findings(config, output, version):
        counts[status] += len(images)
        some = examples[status]
        some |= dict.fromkeys((uri for uri, _ in images[: _EXAMPLES - len(some)]), "")
        write(status, images)
    reasons = _reasons(output, version, [parquet_text(uri) for some in examples.values() for uri in some])
    return Reconciled(counts, {status: {uri: reasons.get(uri, "") for uri in some} for status, some in examples.items()})


def _findings(config: Config, output: str, version: RowVersion) -> Iterator[tuple[str, Images]]:
    """The images in parts of one status each."""
    done, seen = DoneRows(output, version, run=uuid.uuid4().hex), list[np.ndarray]()
    rows = (exact_uris(batch) for batch in _rows(output, DETECTIONS, version))
    known = np.concatenate([np.zeros(0, np.uint64), *map(_hashes, rows)])
    known.sort()  # in place: a copy would take as much again
    refs = shown(_listed(config, output), "comparing", "images")
    with ThreadPoolExecutor(MAX_PARALLEL, "ask-generation") as pool:
        while some := list(islice(refs, _AT_ONCE)):
            hashes = _hashes([ref.uri for ref in some])
            became, is_new = done.among(some, pool), _add(seen, hashes)  # several inputs may name one image
            found = np.select([became == DETECTED, became == FAILED, contains(known, hashes)], range(3), 3)
            for number, status in enumerate(STATUSES):
                if len(places := np.flatnonzero(is_new & (found == number))):
                    yield status, [(some[place].uri, some[place].generation) for place in places]
    folders = [location_of(pattern) for pattern in config.all_patterns() if not is_manifest(pattern)]
    for batch in _rows(output, DETECTIONS, version) if folders else ():
        uris = exact_uris(batch)
        rest = compress(zip(uris, batch["generation"].to_pylist(), strict=True), _add(seen, _hashes(uris)))
        if gone := [image for image in rest if any(_is_named(file_of(image[0]), folder) for folder in folders)]:
            yield ORPHANED, gone


def _is_named(file: str, folder: Location) -> bool:
    return file.startswith(folder.folder) and folder.matches(file[len(folder.folder) :])


def _listed(config: Config, output: str) -> Iterator[ImageRef]:
    """The images as the job lists them; those of containers are read for it."""
    for ref in list_images(config.all_patterns(), output, allowed=config.stream.allow_uri_prefix):
        if isinstance(ref, DeadLetter):
            continue
        if is_container(ref.uri):
            found = images_in(ref, config.read, config.detect.max_megapixels)
            yield from (image.ref for image in found if not isinstance(image, str))
        else:
            yield ref


def _rows(output: str, kind: str, version: RowVersion) -> Iterator[pa.RecordBatch]:
    """The rows of a kind, of this version."""
    wanted = {"model": version.model, "version": version.version, "settings": version.settings_of(kind)}
    columns = ["uri", "uri_bytes", "generation", *wanted, *(["reason"] if kind == DEAD_LETTERS else [])]
    for _, batch in ResultsFolder(output, (kind,)).batches(columns=columns):
        is_wanted = [pc.equal(batch[name], value) for name, value in wanted.items()]
        yield batch.filter(functools.reduce(pc.and_, is_wanted))


def _reasons(output: str, version: RowVersion, uris: Sequence[str]) -> dict[str, str]:
    """The reasons of the dead letters of some images, which are named as shards have them."""
    wanted, reasons = pa.array(uris, pa.string()), dict[str, str]()
    for batch in _rows(output, DEAD_LETTERS, version) if uris else ():
        found = batch.filter(pc.is_in(batch["uri"], wanted))
        reasons |= zip(exact_uris(found), found["reason"].to_pylist(), strict=True)
    return reasons


def _hashes(uris: Sequence[str]) -> np.ndarray:
    return row_keys((uri, "", "", "", "") for uri in uris)


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
