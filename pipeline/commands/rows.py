"""`detect-objects rows`: prints the rows of a results folder as JSON Lines.

    detect-objects rows out/ | jq -c '[.image.uri, .detections[0].class_name]'
    detect-objects rows out/ --dead [--all]

Jobs and streams may write meanwhile.

Exit code 0: done; 1: failed; 2: a wrong command or place; 130: stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.errors import DONE, CommandParser, OutputError, run_command
from pipeline.exports.write_jsonl import write_jsonl
from pipeline.results.current import current_rows
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, check_results, results_folder
from pipeline.results.reader import ResultsFolder
from pipeline.results.rows import json_rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = make_parser().parse_args(argv)
    return run_command(lambda: _print(flags), "the rows cannot be printed", "stopped")


def _print(flags: argparse.Namespace) -> int:
    output, kind = results_folder(flags.folder), DEAD_LETTERS if flags.dead else DETECTIONS
    check_results(output)
    try:
        write_jsonl(_every_row(output, kind) if flags.all else current_rows(output, kind=kind), sys.stdout.buffer)
        sys.stdout.flush()
    except FileNotFoundError as err:  # what is printed cannot be taken back
        raise OutputError(f"output {output}: a compaction has changed it meanwhile; print its rows again") from err
    except BrokenPipeError:  # as of `| head`; https://docs.python.org/3/library/signal.html#note-on-sigpipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DONE


def _every_row(output: str, kind: str) -> Iterator[dict[str, Any]]:
    results = ResultsFolder(output, (kind,))
    for _, batch in results.batches():
        yield from json_rows(batch, kind)
    results.check_whole()


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog="detect-objects rows",
        description="Prints the current rows of a results folder as JSON Lines: of each image and model the one that counts.",
    )
    parser.add_argument("folder", metavar="OUT", help="the results folder, local, gs://, s3:// or abfs://")
    parser.add_argument("--dead", action="store_true", help="the current rows that are dead letters instead")
    parser.add_argument("--all", action="store_true", help="every row, also those that a newer one superseded")
    return parser
