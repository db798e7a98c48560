"""What a row is: the columns of shards, built from arrays, read from shards of any release, and as JSON rows.

A column that a release adds has a default, so that rows of earlier releases are read as if they had it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.extra_fields import extra_of
from pipeline.records import DeadLetter, DetectedImage, ImageRef, dead_letter_row, name_bytes
from pipeline.results.completion import RowVersion, row_keys
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS

_BOX = pa.list_(pa.float32(), 4)
_DETECTION = pa.struct([("box_xyxy", _BOX), ("class_id", pa.int32()), ("class_name", pa.string()), ("confidence", pa.float32())])
_NEEDED = object()  # a row without this value is no row of this program

JSON_COLUMNS = ("uri", "uri_bytes", "generation", "width", "height", "model", "version", "extra", "detections")  # of detections


class Column(NamedTuple):
    """A column of rows.

    Attributes:
      name: Its name.
      type: Its type in shards that this release writes.
      default: What stands for it where a shard has no such column, or no value in it; a shard that lacks a needed one is damaged.
      since: The release that added it.
    """

    name: str
    type: pa.DataType
    default: Any = _NEEDED
    since: str = "0.1.0"


class RowFormat(NamedTuple):
    """The columns of a kind of rows: what shards of this release have, and how those of others are read."""

    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        """The columns of shards that this release writes."""
        return pa.schema([(column.name, column.type) for column in self.columns])

    def conform(self, rows: pa.RecordBatch, names: Sequence[str] | None = None) -> pa.RecordBatch:
        """Rows that any release wrote, or another program wrote anew, with the columns of this release.

        Args:
          rows: Rows with any columns; unknown ones are left out.
          names: Only these columns; None: all.

        Raises:
          ValueError: A needed value is missing, or a column has values of another kind.
        """
        wanted = [column for column in self.columns if names is None or column.name in names]
        arrays = [
            _conformed(rows.column(column.name), column) if column.name in rows.schema.names else _defaults(column, rows.num_rows)
            for column in wanted
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(column.name, column.type) for column in wanted]))


def _conformed(values: pa.Array, column: Column) -> pa.Array:
    if values.type != column.type:
        values = values.cast(column.type)
    if values.null_count and column.default is not None:
        if column.default is _NEEDED:
            raise ValueError(f"expected a value of {column.name} in each row")
        values = values.fill_null(column.default)
    if pa.types.is_list(column.type):
        _check_whole(values.flatten(), column.name)
    return values


def _check_whole(values: pa.Array, name: str) -> None:
    """Makes sure that nothing within a list is null."""
    if values.null_count:
        raise ValueError(f"expected a value in each field of {name}")
    if pa.types.is_struct(values.type):
        for part in values.flatten():
            _check_whole(part, name)
    elif pa.types.is_fixed_size_list(values.type):
        _check_whole(values.flatten(), name)


def _defaults(column: Column, rows: int) -> pa.Array:
    if column.default is _NEEDED:
        raise ValueError(f"expected a column {column.name}")
    return pa.nulls(rows, column.type) if column.default is None else pa.repeat(pa.scalar(column.default, column.type), rows)


_COMMON = (
    Column("key", pa.uint64()),
    Column("uri", pa.string()),
    Column(
        "uri_bytes", pa.binary(), None
    ),  # of a name that is no Unicode, whose bytes stand escaped in `uri`; null for all others
    Column("generation", pa.string(), ""),
    Column("model", pa.string(), ""),
    Column("version", pa.string(), ""),
    Column("settings", pa.string(), ""),
    Column("run", pa.string(), ""),
    Column("made_at", pa.timestamp("us", "UTC")),
)
_EXTRA = Column("extra", pa.string(), None)
FORMATS = {
    DETECTIONS: RowFormat(
        (
            *_COMMON,
            Column("width", pa.int32(), 0),
            Column("height", pa.int32(), 0),
            Column("detections", pa.list_(_DETECTION)),
            _EXTRA,
        )
    ),
    DEAD_LETTERS: RowFormat(
        (
            *_COMMON,
            *(Column(name, pa.string(), "") for name in ("stage", "reason", "message")),
            Column("record", pa.string(), None),
            Column("model_was_called", pa.bool_(), False),
            Column("payload", pa.binary(), None),
            _EXTRA,
        )
    ),
}


def rows_by_kind(records: Sequence[DetectedImage | DeadLetter], version: RowVersion, run: str) -> Iterator[tuple[str, pa.Table]]:
    """The rows of each kind that there is, made now."""
    if images := [record for record in records if isinstance(record, DetectedImage)]:
        yield DETECTIONS, detections_table(images, version, run, time.time())
    if letters := [record for record in records if isinstance(record, DeadLetter)]:
        yield DEAD_LETTERS, dead_letters_table(letters, version, run, time.time())


def record_bytes(record: DetectedImage | DeadLetter) -> int:
    """About what a record takes in memory, without a thumbnail; measured."""
    of_kind = 40 * len(record.detections) if isinstance(record, DetectedImage) else len(record.message) + len(record.payload)
    return 1000 + len(record.ref.uri) + len(record.ref.extra) + of_kind


def detections_table(images: Sequence[DetectedImage], version: RowVersion, run: str, made_at: float) -> pa.Table:
    """Rows of detected images, at least one, built from arrays; boxes are rounded to 0.01 pixel, confidences to 1e-5."""
    found = [image.detections for image in images]
    text_of = functools.cache(parquet_text)  # images have few class names
    ends = np.cumsum([0, *map(len, found)])
    boxes = np.concatenate([each.boxes_xyxy for each in found]).astype(np.float64)
    confidences = np.concatenate([each.confidences for each in found]).astype(np.float64)
    detections = pa.StructArray.from_arrays(
        [
            pa.FixedSizeListArray.from_arrays(pa.array(np.round(boxes, 2).astype(np.float32).ravel()), type=_BOX),
            pa.array(np.concatenate([each.class_ids for each in found]).astype(np.int32)),
            pa.array([text_of(name) for each in found for name in each.class_names], pa.string()),
            pa.array(np.round(confidences, 5).astype(np.float32)),
        ],
        fields=list(_DETECTION),
    )
    columns = {
        "width": [image.width for image in images],
        "height": [image.height for image in images],
        "detections": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), detections),
        "extra": [image.ref.extra or None for image in images],
    }
    named = [(image.ref.uri, image.ref.generation, image.model_name, image.model_version) for image in images]
    return _table(DETECTIONS, named, columns, version, run=run, made_at=made_at)


def dead_letters_table(letters: Sequence[DeadLetter], version: RowVersion, run: str, made_at: float) -> pa.Table:
    """Rows of dead letters. One without an image has a key of its message, so that compaction merges only equal ones."""
    named = [
        (
            each.ref.uri or f"{each.message}\0{each.payload.hex()}",
            each.ref.generation,
            each.model_name or version.model,
            each.model_version if each.model_name else version.version,
        )
        for each in letters
    ]
    columns = {
        "uri": [each.ref.uri for each in letters],
        **{name: [getattr(each, name) for each in letters] for name in ("stage", "reason", "message")},
        "record": [each.ref.record or None for each in letters],
        "model_was_called": [bool(each.model_name) for each in letters],
        "payload": [each.payload or None for each in letters],
        "extra": [each.ref.extra or None for each in letters],
    }
    return _table(DEAD_LETTERS, named, columns, version, run=run, made_at=made_at)


def _table(
    kind: str,
    named: Sequence[tuple[str, str, str, str]],
    columns: dict[str, Any],
    version: RowVersion,
    *,
    run: str,
    made_at: float,
) -> pa.Table:
    """The table of these columns and the common ones; `named` has what is in the key, from URI to version."""
    rows = len(named)
    columns = {
        "key": row_keys((*each, version.settings) for each in named),
        **{name: [each[place] for each in named] for place, name in enumerate(("uri", "generation", "model", "version"))},
        "settings": [version.settings_of(kind)] * rows,
        "run": [run] * rows,
        "made_at": [int(made_at * 1e6)] * rows,  # microseconds
        **columns,
    }
    columns["uri_bytes"] = [name_bytes(uri) if parquet_text(uri) != uri else None for uri in columns["uri"]]
    schema = FORMATS[kind].schema
    columns |= {column.name: [column.default] * rows for column in FORMATS[kind].columns if column.name not in columns}
    for field in schema:
        if field.type == pa.string():
            columns[field.name] = [text and parquet_text(text) for text in columns[field.name]]
    return pa.Table.from_pydict(columns, schema=schema)


def json_rows(batch: pa.RecordBatch, kind: str) -> Iterator[dict[str, Any]]:
    """The rows as `detection_row` and `dead_letter_row` make them, for exports; each is a few kB as Python objects."""
    return _detection_rows(batch) if kind == DETECTIONS else map(_dead_letter_row, batch.to_pylist())


def _detection_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Rows of detections, from columns: five times as fast as from each row's objects.

    The lists of a row are made with it: many at once would make Python look for garbage.
    """
    boxes, class_ids, names, confidences = pc.list_flatten(batch["detections"]).flatten()
    corners = np.round(boxes.flatten().to_numpy().astype(np.float64), 2).tolist()
    columns = class_ids.to_pylist(), names.to_pylist(), np.round(confidences.to_numpy().astype(np.float64), 5).tolist()
    found = (
        {"box_xyxy": corners[4 * place : 4 * place + 4], "class_id": number, "class_name": name, "confidence": sure}
        for place, (number, name, sure) in enumerate(zip(*columns, strict=True))
    )
    of_rows = batch.select(JSON_COLUMNS[:-1]).to_pylist()
    for row, objects in zip(of_rows, pc.list_value_length(batch["detections"]).to_pylist(), strict=True):
        yield {
            "image": {"uri": uri_of(row), **{name: row[name] for name in ("generation", "width", "height")}},
            "model": {"name": row["model"], "version": row["version"]},
            "detections": list(islice(found, objects)),
            **({"extra": extra} if (extra := extra_of(row["extra"])) else {}),
        }


def _dead_letter_row(row: dict[str, Any]) -> dict[str, Any]:
    extra = row["extra"] if extra_of(row["extra"]) else ""
    ref = ImageRef(uri_of(row), row["generation"], extra=extra, record=row["record"] or "")
    model = (row["model"], row["version"]) if row["model_was_called"] else ("", "")
    return dead_letter_row(DeadLetter(ref, row["stage"], row["reason"], row["message"], row["payload"] or b"", *model))


def exact_uris(rows: pa.Table | pa.RecordBatch) -> list[str]:
    """The URIs of rows, with the bytes of names that are no Unicode."""
    uris: list[str] = rows["uri"].to_pylist()
    if (exact := rows["uri_bytes"]).null_count < len(uris):
        named = zip(uris, exact.to_pylist(), strict=True)
        uris = [uri_of({"uri": uri, "uri_bytes": name}) for uri, name in named]
    return uris


def uri_of(row: dict[str, Any]) -> str:
    """The URI of a row, with the bytes of a name that is no Unicode."""
    exact = row["uri_bytes"]
    return str(row["uri"]) if exact is None else bytes(exact).decode("utf-8", "surrogatepass")


def parquet_text(value: str) -> str:
    """Text that Parquet can hold: bytes of a name that is no UTF-8 are escaped."""
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
