"""`detect-objects reconcile`, `python -m pipeline.reconcile`: which images have a result, and which have none.

    detect-objects reconcile --config job.yaml [the flags of the job] [--write-missing FILE.jsonl]

It takes the settings of a job, and asks what that job would ask; `pipeline.listing.statuses` has the statuses of images.

Exit code 0: complete, the job would find nothing new; 1: it is not, or storage does not answer; 2: a wrong command or place; 130:
stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pipeline.config import Config, check_model_is_named, load_config
from pipeline.config.flags import add_setting_flags, overrides
from pipeline.config.paths import local_path
from pipeline.detect.load_model import name_and_version
from pipeline.errors import CommandParser, ConfigError, InputError, run_command
from pipeline.listing.list_images import check_inputs
from pipeline.listing.statuses import OF_LISTED, ORPHANED, reasons, statuses
from pipeline.log_lines import say
from pipeline.records import row_bytes
from pipeline.results.completion import RowVersion
from pipeline.results.layout import refuse_older_rows, results_folder
from pipeline.results.reader import undisturbed
from pipeline.storage.files import create, file_to_write, move_files, staging
from pipeline.storage.waiting import waiting_for

_WRITTEN = ("missing", "dead", "stale", ORPHANED)
_EXAMPLES = 5

Examples = dict[str, dict[str, str]]
"""A few images of each status, each with the reason of its dead letter, or without one."""


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
    given = {name: path for name in _WRITTEN if (path := getattr(flags, f"write_{name}"))}
    paths = {name: file_to_write(f"--write-{name}", local_path(path)) for name, path in given.items()}
    config = load_config(flags.config, overrides(flags))
    if not config.output or "/topics/" in config.output:
        raise ConfigError("no output: expected --output with a results folder or archive")
    check_inputs(config.patterns(), allow_empty=True)
    check_model_is_named(config.model, config.detect)
    version = RowVersion.of(config.as_dict(), name_and_version(config.model, config.detect.engine))
    output = results_folder(config.output)
    with waiting_for(f"output {output}"):
        refuse_older_rows(output)
    with contextlib.ExitStack() as stack:
        # manifests get their names when all is compared
        staged = {name: f"{stack.enter_context(staging(posixpath.dirname(path)))}/{name}" for name, path in paths.items()}
        counts, examples = undisturbed(lambda: compare(config, output, version, staged))
        if not (counts or config.allow_empty):
            raise InputError(
                f"input {', '.join(config.input)}: names no image, and no row is of one that is gone; check the path"
            )
        move_files({staged[status]: path for status, path in paths.items()})
    say(_table(counts, examples))
    return int(_is_incomplete(counts))


def compare(config: Config, output: str, version: RowVersion, manifests: Mapping[str, str]) -> tuple[Counter[str], Examples]:
    """Writes the images of some statuses to manifests, and counts those of all.

    Args:
      config: The job's settings.
      output: The results folder or archive.
      version: The model, its version and the settings whose rows count.
      manifests: The path of a manifest for each status that has one.

    Raises:
      InputError: An input cannot be listed.
      FileNotFoundError: A compaction has deleted a shard meanwhile; begin anew, see `undisturbed`.
    """
    counts, examples = Counter[str](), {status: list[str]() for status in (*OF_LISTED, ORPHANED)}
    with contextlib.ExitStack() as opened:
        files = {status: opened.enter_context(create(path)) for status, path in manifests.items()}
        for status, images in statuses(config, output, version):
            counts[status] += len(images)
            examples[status] += [uri for uri, _ in images[: _EXAMPLES - len(examples[status])]]
            if file := files.get(status):
                rows = ({"uri": uri} | ({"generation": generation} if generation else {}) for uri, generation in images)
                file.writelines(row_bytes(row) + b"\n" for row in rows)
    found = reasons(output, version, [uri for some in examples.values() for uri in some])
    return counts, {status: {uri: found.get(uri, "") for uri in some} for status, some in examples.items()}


def _table(counts: Counter[str], examples: Examples) -> Iterator[str]:
    """What there is, with a few examples of what is wrong."""
    yield f"{counts.total() - counts[ORPHANED]:>11,} listed"
    for status, some in examples.items():
        yield f"{counts[status]:>11,} {status}"
        for uri, reason in some.items() if status != "done" else ():
            yield f"            {uri}{f'  {reason}' if reason else ''}"
    yield "not complete: the same job does what is missing or stale" if _is_incomplete(counts) else "complete"


def _is_incomplete(counts: Counter[str]) -> bool:
    """Whether the job would find something new."""
    return bool(counts["missing"] or counts["stale"])
