"""`detect-objects load`: loads the rows of a results folder into BigQuery.

    detect-objects load --output gs://bucket/detections --table project.dataset.detections [--since yesterday]

It creates the tables, partitioned by day of `made_at` and clustered by `model`. Run it again, by cron for a stream: it adds the
rows that the tables lack (see `results.bigquery_loader`).

Exit code 0: done, or nothing to do; 1: failed, or BigQuery refused files; 2: a wrong command, place or table; 130: stopped.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import GoogleAuthError
from google.cloud import bigquery

from pipeline.config.dates import days_flag
from pipeline.errors import CommandParser, ConfigError, run_command
from pipeline.log_lines import plural
from pipeline.results.bigquery_loader import load
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, check_results, results_folder

_EMULATOR = "BIGQUERY_EMULATOR_HOST"  # the client reads it, too


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = make_parser().parse_args(argv)
    stopped = "stopped; the next load goes on, and loads no row twice"
    return run_command(lambda: _load(flags), "the load failed, and the next one goes on", stopped)


def _load(flags: argparse.Namespace) -> int:
    output, tables = results_folder(flags.output), _tables(flags)
    check_results(output)
    since = days_flag("--since", flags.since)[0] if flags.since else 0.0
    try:
        done = load(output, tables, _client(tables[DETECTIONS]), since)
    except GoogleAuthError as err:
        text = " ".join(str(err).split())[:500]
        raise ConfigError(f"no credentials for BigQuery: {text}; run gcloud auth application-default login") from err
    print(f"{plural(done.rows, 'row')} loaded; {plural(done.refused, 'file')} refused")
    return 1 if done.refused else 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog="detect-objects load", description="Loads the rows of a results folder into BigQuery, each row once."
    )
    add = parser.add_argument
    add("--output", required=True, metavar="FOLDER", help="the results folder or archive, local, gs://, s3:// or abfs://")
    add("--table", required=True, metavar="PROJECT.DATASET.TABLE", help="of detections; created if it is missing")
    text = "of dead letters (default: that of detections, with _dead_letters at its end)"
    add("--dead-letters-table", default="", metavar="PROJECT.DATASET.TABLE", help=text)
    text = "only files that were written from this day on (UTC): 2026-11-20, or yesterday (default: all files)"
    add("--since", default="", metavar="DAY", help=text)
    return parser


def _tables(flags: argparse.Namespace) -> dict[str, str]:
    tables = {DETECTIONS: flags.table, DEAD_LETTERS: flags.dead_letters_table or f"{flags.table}_dead_letters"}
    for flag, name in zip(("--table", "--dead-letters-table"), tables.values(), strict=True):
        if name.count(".") != 2 or "/" in name or "`" in name or not all(name.split(".")):
            raise ConfigError(f"{flag}: expected project.dataset.table, got {name!r}")
    return tables


def _client(table: str) -> bigquery.Client:
    return bigquery.Client(table.partition(".")[0], AnonymousCredentials() if os.environ.get(_EMULATOR) else None)
