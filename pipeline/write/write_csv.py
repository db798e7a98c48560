"""Rows as CSV: one line a detection, for spreadsheets and pandas; an image without objects has no line.

A relative path that a spreadsheet would execute as a formula gets `./` before it, which names the same file.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from pipeline.storage.files import create

COLUMNS = (
    "uri",
    "generation",
    "width",
    "height",
    "model",
    "version",
    "x0",
    "y0",
    "x1",
    "y1",
    "class_id",
    "class_name",
    "confidence",
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # https://owasp.org/www-community/attacks/CSV_Injection


def write_csv(rows: Iterable[dict[str, Any]], path: str) -> None:
    """Writes JSON rows of detections as a CSV file with a header; boxes are xyxy in pixels, not clipped."""
    with create(path) as file:
        text = io.TextIOWrapper(file, "utf-8", "backslashreplace", newline="")
        table = csv.writer(text)
        table.writerow(COLUMNS)
        for row in rows:
            image, model = row["image"], row["model"]
            of_image = (
                _not_a_formula(image["uri"], "./"),
                _not_a_formula(image["generation"], "'"),
                image["width"],
                image["height"],
                _not_a_formula(model["name"], "'"),
                _not_a_formula(model["version"], "'"),
            )
            for found in row["detections"]:
                name = _not_a_formula(found["class_name"], "'")
                table.writerow((*of_image, *found["box_xyxy"], found["class_id"], name, found["confidence"]))
        text.detach()


def _not_a_formula(text: str, prefix: str) -> str:
    return prefix + text if text.startswith(_FORMULA) else text
