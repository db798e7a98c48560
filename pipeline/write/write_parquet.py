"""Rows as Parquet: the columns of the JSON contract, one row an image, detections as a list of structs.

`extra` is JSON text, since each row may have other fields.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.records import row_bytes
from pipeline.storage.files import create

_IMAGE = pa.struct([("uri", pa.string()), ("generation", pa.string()), ("width", pa.int32()), ("height", pa.int32())])
_MODEL = pa.struct([("name", pa.string()), ("version", pa.string())])
_DETECTION = pa.struct(
    [("box_xyxy", pa.list_(pa.float32(), 4)), ("class_id", pa.int32()), ("class_name", pa.string()), ("confidence", pa.float32())]
)
SCHEMA = pa.schema([("image", _IMAGE), ("model", _MODEL), ("detections", pa.list_(_DETECTION)), ("extra", pa.string())])
_ROWS_AT_ONCE = 2000


def write_parquet(lines: Iterable[bytes], path: str) -> None:
    """Writes JSON rows of detections as a Parquet file, a few thousand rows in memory at a time."""
    with (
        create(path) as file,
        pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer,
    ):
        rows = map(_row, lines)
        while some := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(some, schema=SCHEMA))


def _row(line: bytes) -> dict[str, Any]:
    """A row; bytes of a file name that are no UTF-8 stay escaped, since Parquet's strings cannot hold them."""
    row: dict[str, Any] = json.loads(line)
    row["image"]["uri"] = row["image"]["uri"].encode("utf-8", "backslashreplace").decode()
    if "extra" in row:
        row["extra"] = row_bytes(row["extra"]).decode()
    return row
