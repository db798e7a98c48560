"""`detect-objects load`, `python -m pipeline.load_bigquery`: loads the committed rows of a results folder into BigQuery.

    detect-objects load --output gs://bucket/detections --table project.dataset.detections

It creates the tables, partitioned by day of `made_at` and clustered by `model_name`. Run it again, by cron for a stream: it loads
what is new (see `results.bigquery_loader`).

Exit code 0: done, or nothing to do; 1: failed, or BigQuery refused rows; 2: a wrong command, place or table; 3: another load is
at work; 130: stopped.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import GoogleAuthError
from google.cloud import bigquery

from pipeline.errors import ConfigError, exit_code_of
from pipeline.results.bigquery_loader import load
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, results_folder

_EMULATOR = "BIGQUERY_EMULATOR_HOST"  # the client reads it, too


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        done = load(results_folder(flags.output), tables := _tables(flags), _client(tables[DETECTIONS]), flags.busy_wait_s)
    except KeyboardInterrupt:
        print("stopped; the next load goes on, and loads no row twice", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as err:  # noqa: BLE001  whatever BigQuery and storage say, the user gets one line
        code, said = _failure(err)
        print(f"error: {said}", file=sys.stderr)
        return code
    print(f"{done.rows} rows loaded; {done.refused} refused")
    return 1 if done.refused else 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="detect-objects load",
        description="Loads the committed rows of a results folder into BigQuery, each row once.",
        allow_abbrev=False,
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="the results folder or archive, local or gs://")
    parser.add_argument("--table", required=True, metavar="PROJECT.DATASET.TABLE", help="of detections; created if it is missing")
    parser.add_argument(
        "--dead-letters-table",
        default="",
        metavar="PROJECT.DATASET.TABLE",
        help="of dead letters (default: that of detections, with _dead_letters at its end)",
    )
    parser.add_argument(
        "--busy-wait-s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="longest wait for another load of the same table (default: %(default)g)",
    )
    return parser


def _tables(flags: argparse.Namespace) -> dict[str, str]:
    tables = {DETECTIONS: flags.table, DEAD_LETTERS: flags.dead_letters_table or f"{flags.table}_dead_letters"}
    for name in tables.values():
        if name.count(".") != 2 or "/" in name or not all(name.split(".")):
            raise ConfigError(f"--table: expected project.dataset.table, got {name!r}")
    return tables


def _client(table: str) -> bigquery.Client:
    return bigquery.Client(table.partition(".")[0], AnonymousCredentials() if os.environ.get(_EMULATOR) else None)


def _failure(err: Exception) -> tuple[int, str]:
    """The exit code of an error, and its line."""
    if isinstance(err, GoogleAuthError):
        return 2, f"no credentials for BigQuery: {' '.join(str(err).split())[:500]}; run gcloud auth application-default login"
    code, said = exit_code_of(err, "the load failed, and the next one goes on")
    return code, f"another load of the table is at work: {said}" if code == 3 else said


if __name__ == "__main__":
    sys.exit(main())
