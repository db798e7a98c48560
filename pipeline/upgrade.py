"""`detect-objects upgrade OUT`: turns the files of rows of the release before into shards, once (see `results.upgrade`).

Exit code 0: done, or nothing to do; 1: failed, or a file stays, which standard error names; 2: a wrong command or place; 3:
another upgrade is at work; 130: stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pipeline.errors import run_command
from pipeline.results.layout import results_folder
from pipeline.results.lock import locked
from pipeline.results.upgrade import upgrade


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = make_parser().parse_args(argv)
    goes_on = "the upgrade failed, and the next one goes on"
    return run_command(lambda: _upgrade(results_folder(flags.output)), goes_on, "stopped; the next upgrade goes on")


def _upgrade(output: str) -> int:
    with locked(output, "upgrade"):
        done = upgrade(output)
    for line in done.left:
        print(f"warning: {line}", file=sys.stderr)
    print(f"{done.files} files of the release before are shards")
    return 1 if done.left else 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="detect-objects upgrade",
        description="Turns the files of rows of the release before into shards; it may be killed, and run again.",
        allow_abbrev=False,
    )
    parser.add_argument("output", metavar="OUT", help="the results folder or archive, local or gs://")
    return parser


if __name__ == "__main__":
    sys.exit(main())
