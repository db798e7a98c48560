"""Rows as CSV: one line a detection, for spreadsheets and pandas; an image without objects has no line.

A relative path that a spreadsheet would execute as a formula gets `./` before it, which names the same file.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable

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


def write_csv(lines: Iterable[bytes], path: str) -> None:
    """Writes JSON rows of detections as a CSV file with a header; boxes are xyxy in pixels, not clipped."""
    with create(path) as file:
        text = io.TextIOWrapper(file, "utf-8", "backslashreplace", newline="")
        table = csv.writer(text)
        table.writerow(COLUMNS)
        for row in map(json.loads, lines):
            image, model = row["image"], row["model"]
            of_image = (
                _not_a_formula(image["uri"]),
                image["generation"],
                image["width"],
                image["height"],
                model["name"],
                model["version"],
            )
            for found in row["detections"]:
                table.writerow((*of_image, *found["box_xyxy"], found["class_id"], found["class_name"], found["confidence"]))
        text.detach()


def _not_a_formula(uri: str) -> str:
    return f"./{uri}" if uri.startswith(_FORMULA) else uri
