"""`detect-objects compact`: merges the many small shards of a results folder into few large ones.

    detect-objects compact gs://bucket/detections [--until 2026-11-20] [--keep latest]

`results.compact` decides which of several rows of an image stays. It holds the lock of compactions alone: jobs and streams may
write meanwhile.

Exit code 0: done, or nothing to do; 1: failed; 2: a wrong command or place; 3: another compaction is running; 130: stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pipeline.config.dates import days_flag
from pipeline.errors import CommandParser, run_command
from pipeline.log_lines import plural, say
from pipeline.results.compact import compact
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, check_output, check_results, results_folder
from pipeline.results.reader import KINDS, ResultsFolder

_WAIT_SECONDS = 3600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = make_parser().parse_args(argv)
    stopped = "stopped; no row is lost, the next compaction finishes this one"
    return run_command(lambda: _compact(flags), "the compaction failed", stopped)


def _compact(flags: argparse.Namespace) -> int:
    until = days_flag("--until", flags.until)[1] if flags.until else 0.0
    check_output(output := results_folder(flags.output if flags.folder is None else flags.folder))
    check_results(output)
    done = compact(output, until, keep_latest=flags.keep == "latest", wait_s=flags.busy_wait_s)
    if not done.before:
        print(f"nothing to compact in {output}")
        return 0
    left = {kind: sum(len(table) for _, table in ResultsFolder(output, (kind,)).tables(["key"])) for kind in KINDS}
    files = f"{plural(done.before, 'file')} of rows became {done.files}"
    dropped = f"{plural(done.dropped, 'row')} dropped as duplicate or superseded"
    rows = f"{plural(left[DETECTIONS], 'row')} of detections and {plural(left[DEAD_LETTERS], 'dead letter')}"
    say([f"{files}: {dropped}; left in {output}: {rows}"])
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog="detect-objects compact",
        description="Merges the many small files of rows in a results folder into few large ones, one row an image generation, "
        "model version and settings.",
    )
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("folder", nargs="?", metavar="OUT", help="the results folder, local, gs://, s3:// or abfs://")
    place.add_argument("--output", metavar="OUT", help="the same")
    parser.add_argument(
        "--until", default="", metavar="DAY", help="only files whose rows were all made until this day's end (UTC)"
    )
    parser.add_argument(
        "--keep",
        choices=["newest", "latest"],
        default="newest",
        help="latest: of each image and model only the newest detection, whatever its generation, version and settings",
    )
    parser.add_argument(
        "--busy-wait-s",
        type=float,
        default=_WAIT_SECONDS,
        metavar="SECONDS",
        help="longest wait for another compaction of the folder (default: %(default)g)",
    )
    return parser
