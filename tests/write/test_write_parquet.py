"""Parquet holds the rows of the JSON contract."""

import json

import pyarrow.parquet as pq
import pytest

from pipeline.records import row_bytes
from pipeline.write.write_parquet import SCHEMA, write_parquet


def line(number, detections):
    image = {"uri": f"ä{number}.jpg", "generation": "1", "width": 10, "height": 20}
    return json.dumps({"image": image, "model": {"name": "m", "version": ""}, "detections": detections}).encode() + b"\n"


FOUND = {"box_xyxy": [0.5, -1.0, 2.0, 3.25], "class_id": 1, "class_name": "cat", "confidence": 0.5}


@pytest.mark.parametrize("rows", [0, 1, 2000, 4001])
def test_it_reads_back_as_the_same_rows(tmp_path, rows):
    lines = [line(number, [FOUND] * (number % 3)) for number in range(rows)]
    write_parquet(lines, f"{tmp_path}/rows.parquet")
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.schema.equals(SCHEMA)
    assert table.to_pylist() == [json.loads(each) | {"extra": None} for each in lines]


def test_what_else_was_said_of_an_image_is_json_text(tmp_path):
    row = {"image": {"uri": "a"}, "extra": {"camera": 7, "label": "\udc80ä"}}
    write_parquet([row_bytes(row)], f"{tmp_path}/rows.parquet")
    (extra,) = pq.read_table(tmp_path / "rows.parquet")["extra"].to_pylist()
    assert extra == '{"camera": 7, "label": "\\udc80ä"}'
    assert json.loads(extra) == row["extra"]


def test_a_name_that_is_no_unicode_stays_escaped(tmp_path):
    name = json.dumps({"image": {"uri": "a\udc80"}}, ensure_ascii=False).encode("utf-8", "backslashreplace")
    write_parquet([name], f"{tmp_path}/rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist()[0]["image"]["uri"] == "a\\udc80"
