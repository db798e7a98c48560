"""Files of rows as jobs and streams leave them, made without a model."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from pipeline.results.ledger import writing_index

from pipeline.records import row_bytes
from pipeline.results.completion import Provenance
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, index_name
from pipeline.storage.files import list_files, read_lines, write_file

MAKER = Provenance("5e771265", "5e771266", "bright", "3")


class Row(NamedTuple):
    """A row to be: its kind, and what it says."""

    kind: str
    row: dict[str, Any]

    @property
    def line(self) -> bytes:
        return row_bytes(self.row) + b"\n"


def found(uri: str, generation: str = "1", *, version: str = "3", boxes: int = 0, extra: Any = None) -> Row:
    """A row of detections."""
    box = {"box_xyxy": [0.0, 0.0, 1.0, 2.0], "class_id": 0, "class_name": "cat", "confidence": 0.5}
    row = {
        "image": {"uri": uri, "generation": generation, "width": 10, "height": 20},
        "model": {"name": "bright", "version": version},
        "detections": [box] * boxes,
    }
    return Row(DETECTIONS, row | ({"extra": extra} if extra else {}))


def dead(uri: str = "", generation: str = "", *, stage: str = "read", reason: str = "not_found", message: str = "no") -> Row:
    """A dead letter; without a URI that of a message."""
    image = {name: value for name, value in (("uri", uri), ("generation", generation)) if value}
    return Row(DEAD_LETTERS, {"image": image, "stage": stage, "reason": reason, "message": message})


def write_rows(output: str, name: str, rows: Iterable[Row], provenance: Provenance | None = MAKER, made_at: float = 0.0) -> None:
    """Writes files of rows, `<kind>/<kind>-<name>.jsonl`, sorted, and their indexes where there is a provenance."""
    lines: dict[str, list[bytes]] = {}
    for row in rows:
        lines.setdefault(row.kind, []).append(row.line)
    for kind, own in lines.items():
        file = f"{kind}/{kind}-{name}.jsonl"
        write_file(f"{output}/{file}", b"".join(sorted(own)))
        if provenance:
            with writing_index(f"{output}/{index_name(file)}", kind, provenance, made_at) as note:
                for line in sorted(own):
                    note(line)


def without_age(name: str, content: bytes) -> bytes:
    """The content of a file of a results folder; of an index all but when the job began that made its rows."""
    if not name.startswith("index/"):
        return content
    index = pq.read_table(io.BytesIO(content))
    return repr((index.schema.metadata, index.drop_columns(["made_at"]).to_pylist())).encode()


def lines_in(output: str, kind: str = DETECTIONS) -> list[bytes]:
    """All rows of a kind, as the files have them, in the order of their names."""
    return [line for path in list_files(f"{output}/{kind}/*.jsonl") for line in read_lines(path)]


def uris_in(output: str, kinds: Sequence[str] = (DETECTIONS, DEAD_LETTERS)) -> set[str]:
    """The images of all rows."""
    return {json.loads(line).get("image", {}).get("uri", "") for kind in kinds for line in lines_in(output, kind)}
