"""A server of the part of BigQuery's REST protocol, v2, that a load sends; rows are checked against the table's columns."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

JSON = dict[str, Any]


class BigQueryServer:
    """Tables and jobs in memory.

    Attributes:
      tables: Resources of tables, by `dataset.table`.
      rows: Their rows.
      jobs: Resources of jobs, by id; a second job of an id is refused.
      answer_instead: Called `before` each upload and `after` each job is accepted; returns an answer's HTTP status, or None.
      outcome: Called with each job that would succeed; an error that it returns fails the job.
    """

    def __init__(self) -> None:
        self.tables: dict[str, JSON] = {}
        self.rows: dict[str, list[JSON]] = {}
        self.jobs: dict[str, JSON] = {}
        self.answer_instead: Callable[[str], int | None] = lambda _when: None
        self.outcome: Callable[[JSON], JSON | None] = lambda _job: None
        self.datasets = {"d"}
        self.host = ""
        self._uploads: dict[str, JSON] = {}
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, body: bytes, headers: Any) -> tuple[int, JSON, dict[str, str]]:
        """The status, body and headers of the answer to a request."""
        if "/upload/" in path and (status := self.answer_instead("before")):
            return _error(status, "backendError", "not accepted")
        with self._lock:
            if "/upload/" in path:
                return self._upload(path, body, headers)
            found = re.fullmatch(
                r"/bigquery/v2/projects/p/(datasets|jobs)(?:/([^/]+))?(?:/tables(?:/(.+))?)?", path.partition("?")[0]
            )
            assert found, f"{method} {path}"
            kind, name, table = found.groups()
            if kind == "jobs":
                return (200, self.jobs[name], {}) if name in self.jobs else _error(404, "notFound", f"Not found: Job {name}")
            if name not in self.datasets:
                return _error(404, "notFound", f"Not found: Dataset p:{name}")
            if method == "POST":
                return self._create(json.loads(body))
            full = f"{name}.{table}"
            return (200, self.tables[full], {}) if full in self.tables else _error(404, "notFound", f"Not found: Table {full}")

    def _create(self, table: JSON) -> tuple[int, JSON, dict[str, str]]:
        at = table["tableReference"]
        name = f"{at['datasetId']}.{at['tableId']}"
        if name in self.tables:
            return _error(409, "duplicate", f"Already Exists: Table {name}")
        top = {column["name"]: column for column in table["schema"]["fields"]}
        for clustered in table.get("clustering", {}).get("fields", []):
            assert top[clustered]["mode"] != "REPEATED"
        assert top[table["timePartitioning"]["field"]]["type"] == "TIMESTAMP"
        created = str(1_000 + len(self.tables))
        self.tables[name] = {**table, "creationTime": created, "location": "EU"}
        self.rows[name] = []
        return 200, self.tables[name], {}

    def _upload(self, path: str, body: bytes, headers: Any) -> tuple[int, JSON, dict[str, str]]:
        if "uploadType=multipart" in path:
            boundary = re.search(rb"boundary=\"?==?[^\";]+", headers["content-type"].encode())
            assert boundary
            mark = b"--" + boundary[0].partition(b"=")[2].strip(b'"')
            about, content = (part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n") for part in body.split(mark)[1:3])
            return self._insert(json.loads(about), content)
        if "upload_id=" not in path:
            self._uploads[number := str(len(self._uploads))] = {"about": json.loads(body), "content": b""}
            return 200, {}, {"location": f"{self.host}{path}&upload_id={number}"}
        upload = self._uploads[path.rpartition("=")[2]]
        upload["content"] += body
        total = int(headers["content-range"].rpartition("/")[2])
        if len(upload["content"]) < total:
            return 308, {}, {"range": f"bytes=0-{len(upload['content']) - 1}"}
        return self._insert(upload["about"], upload["content"])

    def _insert(self, about: JSON, content: bytes) -> tuple[int, JSON, dict[str, str]]:
        name = about["jobReference"]["jobId"]
        assert re.fullmatch(r"[\w-]{1,1024}", name)
        if name in self.jobs:
            return _error(409, "duplicate", f"Already Exists: Job {name}")
        load = about["configuration"]["load"]
        assert load["sourceFormat"] == "NEWLINE_DELIMITED_JSON"
        assert not load.get("maxBadRecords")
        table = "{datasetId}.{tableId}".format(**load["destinationTable"])
        about["jobReference"]["location"] = "EU"
        rows, wrong = [], self.outcome(about)
        for number, line in enumerate(content.split(b"\n")):
            try:
                rows.append(_checked(json.loads(line), self.tables[table]["schema"]["fields"]))
            except (ValueError, TypeError) as err:
                wrong = wrong or {"reason": "invalid", "message": f"JSON parsing error in row {number}: {err}"}
        self.rows[table] += [] if wrong else rows
        status = {"state": "DONE", **({"errorResult": wrong, "errors": [wrong]} if wrong else {})}
        self.jobs[name] = {**about, "id": f"p:EU.{name}", "status": status, "statistics": {}}
        if code := self.answer_instead("after"):
            return _error(code, "backendError", "the answer is lost")
        return 200, self.jobs[name], {}


def _checked(row: Any, columns: list[JSON]) -> JSON:
    """A row as a table keeps it.

    Raises:
      ValueError: It does not fit the columns.
    """
    by_name = {column["name"]: column for column in columns}
    if not isinstance(row, dict) or (unknown := [name for name in row if name not in by_name]):
        raise ValueError(f"No such field: {unknown[0] if isinstance(row, dict) else row}")
    return {name: _value(row[name], by_name[name]) for name in row}


def _value(value: Any, column: JSON) -> Any:
    if column["mode"] == "REPEATED":
        if not isinstance(value, list):
            raise ValueError(f"{column['name']} is not an array")
        return [_value(each, {**column, "mode": "NULLABLE"}) for each in value]
    if value is None or column["type"] == "JSON":
        return value
    if column["type"] == "RECORD":
        return _checked(value, column["fields"])
    if column["type"] == "BYTES":
        return base64.b64decode(value, validate=True)
    if column["type"] == "TIMESTAMP":
        return datetime.datetime.fromisoformat(value)
    kind: Any = {"STRING": str, "INTEGER": int, "FLOAT": (int, float)}[column["type"]]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"Could not convert value to {column['type']}: {column['name']}")
    return value


def _error(status: int, reason: str, message: str) -> tuple[int, JSON, dict[str, str]]:
    return status, {"error": {"code": status, "message": message, "errors": [{"reason": reason, "message": message}]}}, {}


@contextlib.contextmanager
def bigquery_server() -> Iterator[BigQueryServer]:
    """Runs a server on a port of its own; its address is `host`."""
    server = BigQueryServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, answer, headers = server.answer(self.command, self.path, body, self.headers)
            content = json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {**headers, "content-type": "application/json", "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_PUT = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        server.host = f"http://127.0.0.1:{listening.server_address[1]}"
        thread = threading.Thread(target=listening.serve_forever, args=[0.05], daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()
