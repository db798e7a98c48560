"""Rows as CSV: one line a detection, for spreadsheets and pandas; an image without objects has no line.

No spreadsheet executes a text as a formula: a relative path gets `./` before it, which names the same file, others an apostrophe.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any, BinaryIO

_OF_IMAGE = ("uri", "generation", "width", "height", "model", "version")
_OF_DETECTION = ("x0", "y0", "x1", "y1", "class_id", "class_name", "confidence")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # https://owasp.org/www-community/attacks/CSV_Injection


def write_csv(rows: Iterable[dict[str, Any]], file: BinaryIO) -> None:
    """Writes JSON rows of detections as CSV with a header; boxes are xyxy in pixels, not clipped."""
    text = io.TextIOWrapper(file, "utf-8", "backslashreplace", newline="")
    table = csv.writer(text)
    table.writerow((*_OF_IMAGE, *_OF_DETECTION))
    for row in rows:
        image, model = row["image"], row["model"]
        uri = _not_a_formula(image["uri"], "./")
        of_image = (image["generation"], image["width"], image["height"], model["name"], model["version"])
        for found in row["detections"]:
            values = (*of_image, *found["box_xyxy"], found["class_id"], found["class_name"], found["confidence"])
            table.writerow((uri, *(_not_a_formula(value, "'") for value in values)))
    text.detach()


def _not_a_formula(value: Any, prefix: str) -> Any:
    return prefix + value if isinstance(value, str) and value.startswith(_FORMULA) else value
