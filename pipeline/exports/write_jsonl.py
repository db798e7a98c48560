"""Rows as JSON Lines: one line an image, for `jq`, pandas and scripts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, BinaryIO

from pipeline.records import compact_bytes


def write_jsonl(rows: Iterable[dict[str, Any]], file: BinaryIO) -> None:
    """Writes JSON rows, each as one line; boxes are xyxy in pixels, not clipped."""
    file.writelines(compact_bytes(row) + b"\n" for row in rows)
