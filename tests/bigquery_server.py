"""A server of the part of BigQuery's REST protocol, v2, that a load sends; rows are checked against the table's columns.

Of SQL it knows one statement: the MERGE that inserts rows by key and time.
"""

from __future__ import annotations

import datetime
import io
import json
import re
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.storage.files import read_file

JSON = dict[str, Any]
_TYPES = {
    **{"STRING": {pa.string()}, "INTEGER": {pa.int32(), pa.uint64()}, "FLOAT": {pa.float32()}, "BYTES": {pa.binary()}},
    **{"BOOLEAN": {pa.bool_()}, "TIMESTAMP": {pa.timestamp("us", "UTC")}},
}
_MERGE = re.compile(
    r"""
MERGE `p\.(?P<table>[^`]+)` T
USING \(SELECT \* FROM `p\.(?P<source>[^`]+)` WHERE TRUE QUALIFY ROW_NUMBER\(\) OVER \(PARTITION BY key, made_at\) = 1\) S
ON T\.key = S\.key AND T\.made_at = S\.made_at
AND T\.made_at BETWEEN TIMESTAMP '(?P<oldest>[^']+)' AND TIMESTAMP '(?P<newest>[^']+)'
WHEN NOT MATCHED THEN INSERT \((?P<names>[`\w, ]+)\) VALUES \((?P=names)\)
"""
)


class BigQueryServer:
    """Tables and their rows by `dataset.table`, and jobs by id, in memory.

    `answer_instead` is called `before` and `after` each job is accepted; it returns an answer's HTTP status, or None.
    """

    def __init__(self) -> None:
        self.tables: dict[str, JSON] = {}
        self.rows: dict[str, list[JSON]] = {}
        self.jobs: dict[str, JSON] = {}
        self.answer_instead: Callable[[str], int | None] = lambda _when: None
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, body: bytes, headers: Any) -> tuple[int, JSON]:
        """The status and body of the answer to a request."""
        place = r"(/upload)?/bigquery/v2/projects/p/(datasets|jobs|queries)(?:/([^/?]+))?(?:/tables(?:/([^?]+))?)?(?:\?.*)?"
        found = re.fullmatch(place, path)
        assert found, f"{method} {path}"
        has_file, kind, name, table = found.groups()
        is_job = kind == "jobs" and method == "POST"
        if is_job and (status := self.answer_instead("before")):
            return _error(status, "accessDenied", "not accepted")
        with self._lock:
            if kind == "datasets":
                return self._table(method, name, table, body)
            if is_job:
                return self._insert(*(_with_file(body, headers) if has_file else (json.loads(body), b"")))
            if name not in self.jobs:
                return _error(404, "notFound", f"Not found: Job {name}")
            job = self.jobs[name]
            no_rows = {"jobComplete": True, "jobReference": job["jobReference"], "totalRows": "0", "schema": {"fields": []}}
            return 200, job if kind == "jobs" else no_rows

    def _table(self, method: str, dataset: str, table: str, body: bytes) -> tuple[int, JSON]:
        if dataset != "d":
            return _error(404, "notFound", f"Not found: Dataset p:{dataset}")
        given = json.loads(body or b"{}")
        name = f"{dataset}.{given['tableReference']['tableId'] if method == 'POST' else table}"
        if (name in self.tables) is (method == "POST"):
            return _error(409, "duplicate", "Already Exists") if method == "POST" else _error(404, "notFound", "Not found")
        if method == "POST":
            self.tables[name], self.rows[name] = {**given, "location": "EU"}, []
        elif method == "PATCH":
            columns, new = self.tables[name]["schema"]["fields"], given["schema"]["fields"]
            assert new[: len(columns)] == columns and all(column["mode"] == "NULLABLE" for column in new[len(columns) :])
            self.tables[name]["schema"] = {"fields": new}
        elif method == "DELETE":
            del self.rows[name]
            return 200, self.tables.pop(name)
        return 200, self.tables[name]

    def _insert(self, about: JSON, content: bytes) -> tuple[int, JSON]:
        name = about["jobReference"]["jobId"]
        assert re.fullmatch(r"[\w-]{1,1024}", name)
        if name in self.jobs:
            return _error(409, "duplicate", f"Already Exists: Job {name}")
        about["jobReference"]["location"] = "EU"
        wrong, statistics = None, {}
        try:
            statistics = {"query": {"numDmlAffectedRows": str(self._do(about["configuration"], content))}}
        except (ValueError, TypeError, FileNotFoundError) as err:
            wrong = {"reason": "invalid", "message": f"Error while reading data: {err}"}
        status = {"state": "DONE", **({"errorResult": wrong, "errors": [wrong]} if wrong else {})}
        self.jobs[name] = {**about, "id": f"p:EU.{name}", "status": status, "statistics": statistics}
        if code := self.answer_instead("after"):
            return _error(code, "accessDenied", "the answer is lost")
        return 200, self.jobs[name]

    def _do(self, configuration: JSON, content: bytes) -> int:
        """Does a job: all of it, or nothing; returns the number of rows that are new."""
        if "query" in configuration:
            return self._merge(configuration["query"]["query"])
        load = configuration["load"]
        assert load["sourceFormat"] == "PARQUET"
        assert load["parquetOptions"]["enableListInference"]
        table = "{datasetId}.{tableId}".format(**load["destinationTable"])
        rows: list[JSON] = []
        for file in [read_file(uri) for uri in load["sourceUris"]] if "sourceUris" in load else [content]:
            rows += _rows(file, self.tables[table]["schema"]["fields"])
        self.rows[table] += rows
        return len(rows)

    def _merge(self, statement: str) -> int:
        found = _MERGE.fullmatch(statement)
        assert found, statement
        oldest, newest = (datetime.datetime.fromisoformat(found[name]) for name in ("oldest", "newest"))
        rows, names = self.rows[found["table"]], found["names"].replace("`", "").split(", ")
        there = {(row["key"], row["made_at"]) for row in rows if oldest <= row["made_at"] <= newest}
        new = {(row["key"], row["made_at"]): row for row in self.rows[found["source"]]}
        inserted = [{name: row.get(name) for name in names} for identity, row in new.items() if identity not in there]
        rows += inserted
        return len(inserted)


def _with_file(body: bytes, headers: Any) -> tuple[JSON, bytes]:
    """A job with a file of less than 5 MB; the client sends a larger one in parts."""
    boundary = re.search(rb"boundary=\"?(==?[^\";]+)", headers["content-type"].encode())
    assert boundary
    about, content = (part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n") for part in body.split(b"--" + boundary[1])[1:3])
    return json.loads(about), content


def _rows(file: bytes, columns: list[JSON]) -> list[JSON]:
    """The rows of a Parquet file.

    Raises:
      ValueError: They do not fit the columns.
    """
    rows, by_name = pq.read_table(io.BytesIO(file)), {column["name"]: column for column in columns}
    for field in rows.schema:
        if field.name not in by_name:
            raise ValueError(f"No such field: {field.name}")
        if not _fits(field.type, by_name[field.name]):
            raise ValueError(f"Could not convert {field.type} to {by_name[field.name]['type']}: {field.name}")
    rows["key"].cast(pa.int64())  # BigQuery knows no unsigned numbers
    return rows.to_pylist()


def _fits(of_type: pa.DataType, column: JSON) -> bool:
    if column["mode"] == "REPEATED":
        is_list = pa.types.is_list(of_type) or pa.types.is_fixed_size_list(of_type)
        return is_list and _fits(of_type.value_type, {**column, "mode": "NULLABLE"})
    if column["type"] == "RECORD":
        fields = {field["name"]: field for field in column["fields"]}
        return pa.types.is_struct(of_type) and all(_fits(field.type, fields[field.name]) for field in of_type)
    return of_type in _TYPES[column["type"]]


def _error(status: int, reason: str, message: str) -> tuple[int, JSON]:
    return status, {"error": {"code": status, "message": message, "errors": [{"reason": reason, "message": message}]}}
