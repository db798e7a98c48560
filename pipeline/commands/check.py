"""`detect-objects check`: are all files of rows in a results folder whole, and which images lost their rows by damage.

    detect-objects check out/

It reads every file of rows, and marks damaged ones, so that the next job detects in their images again. Then delete those files.

Exit code 0: all rows can be read; 1: some are damaged, or cannot be read now; 2: a wrong command or place; 130: stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

from pipeline.errors import DONE, FAILED, CommandParser, run_command
from pipeline.log_lines import plural, say
from pipeline.results.check import Checked, check
from pipeline.results.layout import check_results, results_folder
from pipeline.results.reader import undisturbed

_SHOWN = 20  # images


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = make_parser().parse_args(argv)
    return run_command(lambda: _check(flags), "the check failed")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog="detect-objects check",
        description="Reads all rows of a results folder, and says which are damaged and which images lost theirs.",
    )
    parser.add_argument("folder", metavar="OUT", help="the results folder, local, gs://, s3:// or abfs://")
    return parser


def _check(flags: argparse.Namespace) -> int:
    check_results(output := results_folder(flags.folder))
    found = undisturbed(partial(check, output))
    say(_lines(found))
    return FAILED if found.damaged else DONE


def _lines(found: Checked) -> Iterator[str]:
    yield f"{plural(found.shards, 'whole file')} of rows, with {plural(found.rows, 'row')}"
    if not found.damaged:
        return
    yield f"{plural(len(found.damaged), 'damaged file')}:"
    yield from (f"  {path}: {why}" for path, why in sorted(found.damaged.items()))
    yield f"{plural(len(found.lost), 'image')} without another row{':' if found.lost else ''}"
    yield from (f"  {uri}" for uri in found.lost[:_SHOWN])
    if len(found.lost) > _SHOWN:
        yield f"  and {len(found.lost) - _SHOWN} more"
    if found.nameless:
        yield f"{found.nameless} of the damaged files do not even show the names of their images"
    yield "run the job again, which detects in these images; then delete the damaged files"
