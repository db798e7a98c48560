"""Files of rows of the release before, and how they become shards, once.

    detections/detections-<run>-00000-of-00001.jsonl     rows; dead letters likewise
    index/detections-<run>-00000-of-00001.parquet        the model, settings and time of each row

Each file becomes one shard, whose metadata names the file as its source. The file is deleted once the shard is durable, its index
before it. After a kill the next upgrade finds the name in the shard and only deletes. Memory holds the rows of one file; the
release before wrote at most 100,000 into one.
"""

from __future__ import annotations

import base64
import datetime
import io
import json
import posixpath
import re
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.io.filesystems import FileSystems

from models.progress import shown
from pipeline.errors import OutputError
from pipeline.records import name_bytes, row_bytes
from pipeline.results.completion import RowVersion, row_key
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, RUNS, STAGING, SUMMARY, read_summary
from pipeline.results.rows import SCHEMAS
from pipeline.results.shards import BROKEN, SOURCES, list_shards, sources_of, write_shard
from pipeline.storage.files import delete_files, exists, list_files, read_file
from pipeline.storage.globs import escape_glob
from pipeline.storage.state import is_own_file

UPGRADED = "upgrade"  # the run in the names of these shards; their rows have the run that made them
_OLD = re.compile(r"(detections|dead_letters)-([\w-]+-)?\d{5,}-of-\d{5,}\.jsonl")
_TIME = re.compile(r"\d{8}T\d{6}Z")
_DAMAGED = (*BROKEN, AttributeError, IndexError, OverflowError, RecursionError)


class Upgraded(NamedTuple):
    """What an upgrade did: the number of files that became shards, and a line for each file that could not."""

    files: int
    left: list[str]


def refuse_old_files(output: str) -> None:
    """Makes sure that a results folder has no rows of the release before, which no command would see.

    Raises:
      OutputError: It has.
    """
    if found := _old_files(output) or _unfinished(output):
        raise OutputError(f"output {output}: {found[0]} is of the release before; run once: detect-objects upgrade {output}")


def upgrade(output: str) -> Upgraded:
    """Turns the files of rows of the release before into shards, and deletes them. It may be killed, and run again.

    Raises:
      OutputError: A run of the release before has rows that are in no file yet.
    """
    if found := _unfinished(output):
        raise OutputError(f"output {output}: {found[0]}: a run is not finished; run its command once with the release before")
    upgraded = {name for shard in list_shards(output) if shard.run == UPGRADED for name in sources_of(shard)}
    settings, left, files = _settings_by_limits(output), [], _old_files(output)
    for path in shown(files, "upgrading", "files"):
        kind, name = path.rsplit("/", 2)[1:]
        index = f"{output}/index/{name.removesuffix('.jsonl')}.parquet"
        if name not in upgraded and (content := read_file(path)):
            try:
                table = _table(path, content, index, settings).replace_schema_metadata({SOURCES: json.dumps([name])})
            except _DAMAGED as err:
                left.append(f"{path} stays: {' '.join(str(err).split())[:300]}; move it, or give it to a job as --input")
                continue
            write_shard(output, kind, table, UPGRADED, view=True)
        delete_files([index, f"{path.removesuffix('.jsonl')}.parquet"])  # the second was made from the rows
        delete_files([path])
    return Upgraded(len(files) - len(left), left)


def _old_files(output: str) -> list[str]:
    paths = [path for kind in (DETECTIONS, DEAD_LETTERS) for path in list_files(f"{escape_glob(output)}/{kind}/{kind}-*.jsonl")]
    return [path for path in paths if _OLD.fullmatch(posixpath.basename(path)) and is_own_file(path)]


def _unfinished(output: str) -> list[str]:
    """What a stream archived but did not merge into files, and the states of jobs that were killed while they committed."""
    staging = f"{escape_glob(output)}/{STAGING}*"
    states = [path for path in list_files(f"{staging}/run.json") if b'"state": "committed"' in read_file(path)]
    return [*list_files(f"{staging}/archive/*.rows"), *states]


def _settings_by_limits(output: str) -> dict[str, str]:
    """The hash of the settings in the keys of rows by that in the index of dead letters, from the summaries of runs."""
    known = {}
    for path in list_files(f"{escape_glob(output)}/{RUNS}/*/{SUMMARY}"):
        try:
            version = RowVersion.of(read_summary(posixpath.dirname(path)).get("config", {}))
        except _DAMAGED:
            continue
        known[version.limits] = version.settings
    return known


def _table(path: str, content: bytes, index: str, settings: dict[str, str]) -> pa.Table:
    """The rows of a file as those of a shard.

    Raises:
      ValueError: It has no index that was made for it.
    """
    kind, _, run = posixpath.basename(path).rpartition("-of-")[0].rpartition("-")[0].partition("-")
    named = _TIME.search(run)
    age = (
        datetime.datetime.strptime(f"{named[0]}+0000", "%Y%m%dT%H%M%SZ%z").timestamp()
        if named
        else FileSystems.last_updated(path)
    )
    rows = [json.loads(line) for line in content.splitlines()]
    entries = _entries(index, len(content))
    if [entry["uri"] for entry in entries] != [name_bytes(row["image"]["uri"]) for row in rows if "uri" in row["image"]]:
        raise ValueError("its index was made for other rows")
    of_rows = iter(entries)
    records = [_record(row, next(of_rows) if "uri" in row["image"] else {}, run, age, settings) for row in rows]
    return pa.Table.from_pylist(records, SCHEMAS[kind]).sort_by("uri")


def _entries(index: str, size_bytes: int) -> list[dict[str, Any]]:
    """What the index of a file of this size says of each row with an image."""
    if not (exists(index) and is_own_file(index)):
        raise ValueError("it has no index, so the settings of its rows are not known")
    file = pq.ParquetFile(io.BytesIO(read_file(index)))
    if (file.metadata.metadata or {}).get(b"bytes_of_rows") != str(size_bytes).encode():
        raise ValueError("its index was made for other rows")
    entries: list[dict[str, Any]] = file.read().to_pylist()
    return entries


def _record(row: dict[str, Any], entry: dict[str, Any], run: str, age: float, settings: dict[str, str]) -> dict[str, Any]:
    """A row as a shard has it; `age` is that of its file, for an index without times."""
    uri, generation = row["image"].get("uri", ""), row["image"].get("generation", "")
    text = uri.encode("utf-8", "backslashreplace").decode()
    model, version, of_kind = (entry.get(name, "") for name in ("model", "version", "settings"))
    payload = base64.b64decode(row.get("payload_base64", ""))
    identity = (uri or f"{row['message']}\0{payload.hex()}", generation, model, version)
    return {
        **row,
        **row["image"],
        "key": row_key(*identity, settings.get(of_kind, of_kind)),
        **{"uri": text, "uri_bytes": None if text == uri else name_bytes(uri), "generation": generation},
        **{"model": model, "version": version, "settings": of_kind, "run": run, "model_was_called": "model" in row},
        "made_at": datetime.datetime.fromtimestamp(entry.get("made_at") or age, datetime.timezone.utc),
        "payload": payload or None,
        "extra": row_bytes(row["extra"]).decode() if "extra" in row else None,
    }
