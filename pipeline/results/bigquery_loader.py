"""Loads shards into BigQuery, each row once, without any state of its own.

For each part of the shards, which is bounded by bytes:

1. Load jobs write the shards into a temporary table.
2. One MERGE inserts the rows that the table lacks: by key and `made_at`, within the days of the part.
3. The temporary table is dropped. After a kill BigQuery drops it within a day.

A MERGE is atomic. So a load may be killed at any time, repeated, or run twice at once: no row is lost or duplicated.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from google.api_core import exceptions
from google.cloud import bigquery

from models.base.progress import shown
from pipeline.errors import OutputError
from pipeline.log_lines import console
from pipeline.results.reader import ResultsFolder, undisturbed
from pipeline.results.rows import FORMATS
from pipeline.results.shards import Shard
from pipeline.storage.cloud import GS
from pipeline.storage.files import exists
from pipeline.storage.stores import store_of

_TYPES = {
    **{"uint64": "INTEGER", "int32": "INTEGER", "float": "FLOAT", "bool": "BOOLEAN", "string": "STRING", "binary": "BYTES"},
    "timestamp[us, tz=UTC]": "TIMESTAMP",
}
_PART_BYTES, _PART_FILES = 256 << 20, 1000
_DAY = datetime.timedelta(days=1)
_NO_ROWS = datetime.datetime.fromtimestamp(0, datetime.timezone.utc)


class Loaded(NamedTuple):
    """What a load did: the number of rows that are new in BigQuery, and of files that it refused."""

    rows: int = 0
    refused: int = 0


def table_schema(kind: str) -> list[bigquery.SchemaField]:
    """The columns of a table of `detections` or `dead_letters`: those of shards."""
    return [_field(field.name, field.type) for field in FORMATS[kind].schema]


def _field(name: str, of_type: pa.DataType, mode: str = "NULLABLE") -> bigquery.SchemaField:
    if pa.types.is_list(of_type) or pa.types.is_fixed_size_list(of_type):
        return _field(name, of_type.value_type, "REPEATED")
    if pa.types.is_struct(of_type):
        return bigquery.SchemaField(name, "RECORD", mode, fields=[_field(field.name, field.type) for field in of_type])
    return bigquery.SchemaField(name, _TYPES[str(of_type)], mode)


def load(output: str, tables: Mapping[str, str], client: bigquery.Client, since: float = 0.0) -> Loaded:
    """Loads the rows of a results folder that are not in the tables yet.

    Args:
      output: The folder.
      tables: `project.dataset.table` by kind, `detections` or `dead_letters`.
      client: Of BigQuery.
      since: Only shards with a row that was made at this moment, in seconds since the epoch, or later.

    Raises:
      OutputError: A dataset is missing, or a table has another schema.
      google.api_core.exceptions.GoogleAPICallError: BigQuery fails.
    """
    rows = refused = 0
    for kind, name in tables.items():
        table = _table(client, name, table_schema(kind))

        def read(kind: str = kind, table: bigquery.Table = table) -> int:
            """Loads the shards of a kind; returns the number of refused ones."""
            nonlocal rows
            refused = 0
            results = ResultsFolder(output, (kind,))
            for part in shown(list(_parts(results.shards)), f"loading {kind}", "parts"):
                every = {shard: _times(times) for shard, times in results.tables(["made_at"], part)}
                times = {shard: span for shard, span in every.items() if span[1].timestamp() >= since}
                done = _load(client, table, times) if times else Loaded()
                rows, refused = rows + done.rows, refused + done.refused
            return refused + len(results.damaged)

        refused += undisturbed(read)
    return Loaded(rows, refused)


def _parts(shards: Sequence[Shard]) -> Iterator[list[Shard]]:
    """The shards in parts of bounded bytes, or of one large shard."""
    part: list[Shard] = []
    for shard in shards:
        if part and (len(part) == _PART_FILES or sum(each.size_bytes for each in (*part, shard)) > _PART_BYTES):
            yield part
            part = []
        part.append(shard)
    if part:
        yield part


def _table(client: bigquery.Client, name: str, schema: Sequence[bigquery.SchemaField]) -> bigquery.Table:
    """The table, which is created if it is missing, and gets the columns that it lacks."""
    table = bigquery.Table(name, schema)
    table.time_partitioning = bigquery.TimePartitioning(field="made_at")
    table.clustering_fields = ["model"]
    try:
        client.create_table(table, exists_ok=True)
        found = client.get_table(name)
    except exceptions.NotFound as err:
        raise OutputError(f"table {name}: expected its dataset to exist, found none; create it: bq mk --dataset …") from err
    there, wanted = ({field.name: _type(field) for field in fields} for fields in (found.schema, schema))
    for column, of_type in wanted.items():
        if there.get(column, of_type) != of_type:
            message = f"column {column} is {there[column]}, expected {of_type}; name another table, or alter this one"
            raise OutputError(f"table {name}: it has another schema: {message}")
    if new := [field for field in schema if field.name not in there]:
        found.schema = [*found.schema, *new]
        found = client.update_table(found, ["schema"])
    return found


def _type(field: bigquery.SchemaField) -> str:
    inner = f"<{', '.join(f'{each.name} {_type(each)}' for each in field.fields)}>" if field.fields else ""
    return f"{field.field_type}{inner} {field.mode}"


def _load(
    client: bigquery.Client, table: bigquery.Table, times: Mapping[Shard, tuple[datetime.datetime, datetime.datetime]]
) -> Loaded:
    """Loads some shards; of refused ones halves, down to the file that BigQuery refuses.

    Args:
      client: Of BigQuery.
      table: Where rows go.
      times: The shards, with the times of the oldest and newest row of each.

    Raises:
      FileNotFoundError: A shard is gone.
    """
    shards = list(times)
    temporary = bigquery.Table(f"{table}_load_{uuid.uuid4().hex[:12]}", table_schema(shards[0].kind))
    temporary.expires = datetime.datetime.now(datetime.timezone.utc) + _DAY
    try:
        try:
            client.create_table(temporary)
            _fill(client, temporary, table.location, shards)
        except (exceptions.BadRequest, exceptions.NotFound) as err:
            return _halved(client, table, times, err)
        oldest, newest = min(first for first, _ in times.values()), max(last for _, last in times.values())
        job = client.query(_merge(table, temporary, oldest, newest), location=table.location)
        job.result()
        return Loaded(job.num_dml_affected_rows or 0)
    finally:
        client.delete_table(temporary, not_found_ok=True)


def _halved(
    client: bigquery.Client,
    table: bigquery.Table,
    times: Mapping[Shard, tuple[datetime.datetime, datetime.datetime]],
    err: Exception,
) -> Loaded:
    shards = list(times)
    if missing := next((shard.path for shard in shards if not exists(shard.path)), ""):
        raise FileNotFoundError(f"{missing} is gone") from err
    if len(shards) > 1:
        halves = [
            _load(client, table, {shard: times[shard] for shard in half})
            for half in (shards[: len(shards) // 2], shards[len(shards) // 2 :])
        ]
        return Loaded(*map(sum, zip(*halves, strict=True)))
    console.warning("BigQuery refuses %s: %s", shards[0].path, " ".join(str(err).split())[:500])
    return Loaded(refused=1)


def _times(rows: pa.Table) -> tuple[datetime.datetime, datetime.datetime]:
    """The times of the oldest and the newest row."""
    times = pc.min_max(rows["made_at"])
    return times["min"].as_py() or _NO_ROWS, times["max"].as_py() or _NO_ROWS


def _fill(client: bigquery.Client, temporary: bigquery.Table, location: str, shards: Sequence[Shard]) -> None:
    """Writes shards into the temporary table: objects by one job, which BigQuery reads itself, and each other file by its own."""
    options = bigquery.ParquetOptions()
    options.enable_list_inference = True  # a list is a repeated column
    config = bigquery.LoadJobConfig(
        source_format="PARQUET", schema=temporary.schema, write_disposition="WRITE_APPEND", parquet_options=options
    )
    if uris := [shard.path for shard in shards if shard.path.startswith(GS)]:
        client.load_table_from_uri(uris, temporary, job_config=config, location=location).result()
        return
    for shard in shards:
        with store_of(shard.path).open(shard.path, shard.generation) as file:
            client.load_table_from_file(file, temporary, size=shard.size_bytes, job_config=config, location=location).result()


def _merge(table: bigquery.Table, temporary: bigquery.Table, oldest: datetime.datetime, newest: datetime.datetime) -> str:
    """The statement that inserts rows by key and time; several shards may have one row, so each is taken once."""
    names = ", ".join(f"`{field.name}`" for field in temporary.schema)
    return f"""
MERGE `{table}` T
USING (SELECT * FROM `{temporary}` WHERE TRUE QUALIFY ROW_NUMBER() OVER (PARTITION BY key, made_at) = 1) S
ON T.key = S.key AND T.made_at = S.made_at
AND T.made_at BETWEEN TIMESTAMP '{oldest.isoformat()}' AND TIMESTAMP '{newest.isoformat()}'
WHEN NOT MATCHED THEN INSERT ({names}) VALUES ({names})
"""  # noqa: S608  the command line checks the names of tables
