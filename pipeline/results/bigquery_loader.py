"""Loads rows into BigQuery, each once: a write-ahead log of load jobs.

The state of a table lies in `bigquery/<table>-<creation time>/` of the results folder:

    <id>.jsonl    the rows of a load job; written before the job is sent, deleted after `<id>.loaded` is written
    <id>.loaded   the ids of rows that are in the table or were refused, and of files of which this holds for all rows
    <id>.refused  a row that BigQuery refuses, and why

The id of a job is the hash of its rows and its table. BigQuery refuses a second job of one id, so after a kill the next load
sends the job again and doubles no row. The id of a row is the hash of its line, so the rows of merged files are not loaded again.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import itertools
import json
import posixpath
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from apache_beam.io.filesystems import FileSystems
from google.api_core import exceptions
from google.cloud import bigquery

from models.progress import shown
from pipeline.errors import OutputError
from pipeline.results.cancellation import confirm_commit, stop_from_thread
from pipeline.results.claims import EVERYTHING
from pipeline.results.completion import Provenance
from pipeline.results.layout import BIGQUERY, DEAD_LETTERS, DETECTIONS, seconds_in_name
from pipeline.results.lease import leased
from pipeline.results.ledger import RowsFile, entry_of, list_files_of_rows, read_entries
from pipeline.results.run import Run, fence
from pipeline.row_schema import dead_letter_schema, detection_schema
from pipeline.storage.files import delete_files, list_files, read_file, read_lines, write_file
from pipeline.storage.globs import escape_glob

_SCHEMAS = {DETECTIONS: detection_schema, DEAD_LETTERS: dead_letter_schema}
_TYPES = {"integer": "INTEGER", "number": "FLOAT", "string": "STRING"}
_ID_BYTES = 12
_ROWS_A_JOB = 100_000
_BYTES_A_JOB = 64_000_000  # a job takes three times its size in memory; BigQuery allows 1,500 jobs a table and day
_ATTEMPTS = 3
_MOST_REFUSED = 20  # more are no accident of a few rows


class Loaded(NamedTuple):
    """What a load did: the numbers of rows that BigQuery took, and that it refused."""

    rows: int
    refused: int


def table_schema(kind: str) -> list[bigquery.SchemaField]:
    """The columns of a table of `detections` or `dead_letters`: those of its rows, and what BigQuery needs at the top level."""
    own = [("row_id", "STRING", "hash of the row"), ("made_at", "TIMESTAMP", "when its job or window began")]
    added = [*own, ("model_name", "STRING", "as in model.name; clusters the table")]
    columns = [bigquery.SchemaField(name, of_type, description=text) for name, of_type, text in added]
    return [*columns, *(_field(name, schema) for name, schema in _SCHEMAS[kind]()["properties"].items())]


def _field(name: str, schema: Mapping[str, Any]) -> bigquery.SchemaField:
    mode, of = ("REPEATED", schema["items"]) if schema.get("type") == "array" else ("NULLABLE", schema)
    if of.get("type") == "object":
        is_closed = of.get("additionalProperties") is False
        fields = [_field(*each) for each in of["properties"].items()] if is_closed else []
        return bigquery.SchemaField(
            name, "RECORD" if is_closed else "JSON", mode, description=schema["description"], fields=fields
        )
    of_type = "BYTES" if "contentEncoding" in of else _TYPES[of.get("type", "string")]
    return bigquery.SchemaField(name, of_type, mode, description=schema["description"])


def load(output: str, tables: Mapping[str, str], client: bigquery.Client, wait_s: float = 0.0) -> Loaded:
    """Loads the rows of a results folder that are not in the tables yet.

    Args:
      output: The folder, local or `gs://`.
      tables: `project.dataset.table` by kind, `detections` or `dead_letters`.
      client: Of BigQuery.
      wait_s: The longest wait for another load of the same table.

    Raises:
      OutputError: A dataset is missing, a table has another schema, or BigQuery refuses many rows.
      BusyError: Another load of the same table is at work.
      TakenOverError: Another load has taken over.
      google.api_core.exceptions.GoogleAPICallError: BigQuery fails.
    """
    done = []
    for kind, name in tables.items():
        table = _table(client, name, table_schema(kind))
        folder = f"{output}/{BIGQUERY}/{name}-{round(table.created.timestamp() * 1000)}"
        with leased(Run.new(folder).folder, [EVERYTHING], wait_s=wait_s, lost=stop_from_thread, fence=fence):
            done.append(_Loader(client, table, folder).load(output, kind))
    return Loaded(sum(of.rows for of in done), sum(of.refused for of in done))


def _table(client: bigquery.Client, name: str, schema: Sequence[bigquery.SchemaField]) -> bigquery.Table:
    """The table, which is created if it is missing."""
    table = bigquery.Table(name, schema)
    table.time_partitioning = bigquery.TimePartitioning(field="made_at")
    table.clustering_fields = ["model_name"]
    try:
        client.create_table(table, exists_ok=True)
        found = client.get_table(name)
    except exceptions.NotFound as err:
        raise OutputError(f"table {name}: expected its dataset to exist, found none; create it: bq mk --dataset …") from err
    types = _types(found.schema)
    wrong = [column for column, of_type in _types(schema).items() if types.get(column) != of_type]
    if wrong:
        said = f"column {wrong[0]} is {types.get(wrong[0], 'missing')}, expected {_types(schema)[wrong[0]]}"
        raise OutputError(f"table {name}: it has another schema: {said}; name another table, or alter this one")
    return found


def _types(fields: Sequence[bigquery.SchemaField], above: str = "") -> dict[str, str]:
    """Type and mode by the path of the column."""
    types = {}
    for field in fields:
        types[above + field.name] = f"{field.field_type} {field.mode}"
        types |= _types(field.fields, f"{above}{field.name}.")
    return types


class _Loader:
    """Loads rows into one table, within its lease.

    Args:
      client: Of BigQuery.
      table: The table.
      folder: Of the table's state.
    """

    def __init__(self, client: bigquery.Client, table: bigquery.Table, folder: str):
        self._client, self._table, self._folder = client, table, folder
        loaded = b"".join(map(read_file, self._state_files("loaded")))
        self._loaded = np.sort(np.frombuffer(loaded, f"S{2 * _ID_BYTES}"))
        self._rows = self._refused = 0

    def load(self, output: str, kind: str) -> Loaded:
        """Finishes the jobs of a load that was killed, then loads what is new."""
        for path in self._state_files("jsonl"):
            self._finish(path)
        while not self._pass(output, kind):  # a compaction took files away; their rows are in others
            pass
        return Loaded(self._rows, self._refused)

    def _pass(self, output: str, kind: str) -> bool:
        """Loads all files of a listing; returns whether all were there."""
        matches = FileSystems.match([f"{escape_glob(output)}/{kind}/*"])
        found = {entry.path: entry for match in matches for entry in match.metadata_list}
        rows: dict[str, bytes] = {}
        ids, gone, size_bytes = [], 0, 0
        files = [file for file in list_files_of_rows(output) if file.kind == kind and file.path in found]
        for file in shown(files, f"loading {kind}", "files"):
            time = found[file.path].last_updated_in_seconds
            file_id = _id(f"{posixpath.basename(file.path)} {file.size_bytes} {time}".encode())
            if self._is_loaded(file_id):
                continue
            try:
                for row_id, row in _rows_of(file, seconds_in_name(file.path) or time):
                    if not self._is_loaded(row_id):
                        rows[row_id] = row
                        size_bytes += len(row)
                    if len(rows) == _ROWS_A_JOB or size_bytes >= _BYTES_A_JOB:
                        self._submit([*rows.values()])
                        rows.clear()
                        size_bytes = 0
            except FileNotFoundError:
                gone += 1
                continue
            ids.append(file_id)
        self._submit([*rows.values()])
        self._remember(ids)
        return not gone

    def _submit(self, rows: Sequence[bytes]) -> None:
        """Writes rows into the log, then loads them."""
        if rows:
            self._finish(self._log(rows))

    def _log(self, rows: Sequence[bytes]) -> str:
        content = b"\n".join(rows)
        path = f"{self._folder}/{_id(self._folder.rpartition('/')[2].encode() + content)}.jsonl"
        write_file(path, content)
        return path

    def _finish(self, path: str) -> None:
        """Loads rows that are in the log; of refused ones, halves, down to the row that BigQuery refuses.

        Halves are in the log before their whole leaves it, and are sent afterwards, so after a kill no two jobs share a row.
        """
        rows = read_file(path).split(b"\n")
        ids = [json.loads(row)["row_id"] for row in rows]
        left = [row for row, row_id in zip(rows, ids, strict=True) if not self._is_loaded(row_id)]
        if len(left) < len(rows):
            self._submit(left)
            delete_files([path])
            return
        error = self._run_job(path, b"\n".join(rows))
        if error and len(rows) > 1:
            halves = [self._log(half) for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :])]
            delete_files([path])
            for half in halves:
                self._finish(half)
            return
        if error:
            self._keep_refused(path, rows[0], error)
        self._rows += 0 if error else len(rows)
        self._remember(ids)
        delete_files([path])
        if self._refused == _MOST_REFUSED:
            raise OutputError(f"table {self._table}: BigQuery refused {_MOST_REFUSED} rows, so the load stops; the last: {error}")

    def _keep_refused(self, path: str, row: bytes, error: str) -> None:
        kept = path.removesuffix("jsonl") + "refused"
        write_file(kept, row + b"\n" + error.encode() + b"\n")
        print(f"warning: BigQuery refuses a row: {error}; it is in {kept}", file=sys.stderr)
        self._refused += 1

    def _run_job(self, path: str, content: bytes) -> str:
        """Loads a file of the log exactly once; returns why BigQuery refuses its rows, or nothing.

        A failed job has loaded nothing and has used its id, so the next attempt has the next one.
        """
        attempts = 0
        for number in itertools.count():
            confirm_commit()
            job, is_new = self._job(f"detect-objects-{posixpath.basename(path).partition('.')[0]}-{number}", content)
            try:
                job.result()
                return ""
            except exceptions.GoogleAPICallError as err:
                if not job.error_result:
                    raise
                if not is_new:
                    continue
                if job.error_result.get("reason") == "invalid":
                    return " ".join(str((job.errors or [job.error_result])[-1].get("message")).split())[:500]
                attempts += 1
                if attempts == _ATTEMPTS:
                    raise err
        raise AssertionError("not reached")

    def _job(self, job_id: str, content: bytes) -> tuple[Any, bool]:
        """The load job of this id, and whether it is new."""
        config = bigquery.LoadJobConfig(
            source_format=bigquery.SourceFormat.NEWLINE_DELIMITED_JSON,
            schema=self._table.schema,
            write_disposition="WRITE_APPEND",
        )
        how = {"job_id": job_id, "job_config": config, "location": self._table.location}
        try:
            return self._client.load_table_from_file(io.BytesIO(content), self._table, size=len(content), **how), True
        except exceptions.Conflict:
            return self._client.get_job(job_id, location=self._table.location), False

    def _remember(self, ids: Collection[str]) -> None:
        if ids:
            content = "".join(ids).encode()
            write_file(f"{self._folder}/{_id(content)}.loaded", content)
            self._loaded = np.sort(np.concatenate([self._loaded, np.array([*ids], self._loaded.dtype)]))

    def _is_loaded(self, of: str) -> bool:
        place = np.searchsorted(self._loaded, of.encode())
        return bool(place < len(self._loaded) and self._loaded[place] == of.encode())

    def _state_files(self, ending: str) -> list[str]:
        return list_files(f"{escape_glob(self._folder)}/*.{ending}")


def _id(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_ID_BYTES).hexdigest()


def _rows_of(file: RowsFile, file_age: float) -> Iterator[tuple[str, bytes]]:
    """The id of each row, and the row as it goes to BigQuery; an index has the age of each row."""
    entries = read_entries(file)
    for line in read_lines(file.path):
        known = entry_of(line, file.kind, Provenance()) and next(entries, None)
        made_at = datetime.datetime.fromtimestamp((known and known.made_at) or file_age, datetime.timezone.utc)
        row_id = _id(line.rstrip(b"\n"))
        added = {"row_id": row_id, "made_at": made_at.isoformat(), "model_name": known.model if known else ""}
        yield row_id, json.dumps({**_parsed(line), **added}, ensure_ascii=False).encode("utf-8", "replace")


def _parsed(line: bytes) -> dict[str, Any]:
    """A row; a line that is none becomes one that BigQuery refuses, so that it is kept and named."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    return row if isinstance(row, dict) else {"no_row": line.decode("utf-8", "replace")}
