"""`detect-objects report`: makes the page of a results folder, at any time, of all its current rows or of some.

    detect-objects report out/
    detect-objects report out/ --run 3f2a9c01 --to run.html

Exit code 0: written; 1: rows cannot be read now, or some are damaged; 2: a wrong command or place; 130: stopped.
"""

from __future__ import annotations

import argparse
import json
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config.paths import local_path
from pipeline.errors import CommandParser, InputError, run_command
from pipeline.log_lines import say
from pipeline.outcome.folder_report import page_of_folder
from pipeline.results.layout import REPORT, RUNS, SUMMARY, check_reports, check_results, results_folder
from pipeline.results.wanted import add_row_flags, wanted_rows
from pipeline.storage.files import file_to_write, read_checked, write_file
from pipeline.storage.globs import escape_glob
from pipeline.storage.listing import files_in, location_of


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = make_parser().parse_args(argv)
    return run_command(lambda: _report(flags), "no page is written", "stopped; no page is written")


def _report(flags: argparse.Namespace) -> int:
    output = results_folder(flags.folder)
    to = file_to_write("--to", local_path(flags.to)) if flags.to else f"{output}/{REPORT}"
    if not flags.to:
        check_reports(output)
    page = page_of_folder(output, _summary(output, flags.run), wanted_rows(flags)._replace(run=flags.run))
    write_file(to, page)
    say([flags.to or to])
    return 0


def _summary(output: str, run: str) -> dict[str, Any]:
    """The summary of a run, by default of the newest one; empty where none has ended.

    Raises:
      InputError: The given run has none, or the folder has no results.
    """
    if run:
        if found := _read(folder := f"{output}/{RUNS}/{run}"):
            return found
        raise InputError(f"{folder}: expected the {SUMMARY} that a run of this program has written, found none")
    check_results(output)
    of_runs = files_in(location_of(f"{escape_glob(output)}/{RUNS}/*/{SUMMARY}"))
    return _read(output) or max(map(_read, (posixpath.dirname(file.path) for file in of_runs)), key=_ended, default={})


def _read(folder: str) -> dict[str, Any]:
    found: Any = read_checked(f"{folder}/{SUMMARY}", json.loads)
    return found if isinstance(found, dict) and {"images", "model", "config", "confidences"} <= {*found} else {}


def _ended(summary: Mapping[str, Any]) -> str:
    return str(summary.get("finished_at", ""))


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog="detect-objects report", description="Makes the page of a results folder, of all its current rows or of some."
    )
    add = parser.add_argument
    add("folder", metavar="RESULTS", help="the results folder, local, gs://, s3:// or abfs://")
    add("--run", default="", metavar="RUN", help="only rows that this run wrote")
    add_row_flags(parser)
    add("--to", default="", metavar="FILE", help="the page to write (default: report.html in the results folder)")
    return parser
