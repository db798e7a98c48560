"""Rows as tasks of Label Studio with predictions, which annotators accept or correct.

Source of the format: https://labelstud.io/guide/predictions
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, BinaryIO
from urllib.parse import quote

from pipeline.exports.data_set import Box
from pipeline.exports.write_coco import JsonList
from pipeline.exports.write_labels import clipped
from pipeline.records import path_bytes


def write_label_studio(rows: Iterable[dict[str, Any]], file: BinaryIO) -> None:
    """Writes JSON rows as a JSON array of tasks; one task is in memory at a time."""
    tasks = JsonList(file, b"[")
    for row in rows:
        tasks.add(_task(row))
    file.write(b"]\n")


def _task(row: dict[str, Any]) -> dict[str, Any]:
    image, model = row["image"], row["model"]
    found = [_region(number, each, box, image) for number, (each, box) in enumerate(clipped(row))]
    score = min((each["score"] for each in found), default=0.0)
    prediction = {"model_version": f"{model['name']} {model['version']}", "score": score, "result": found}
    data = {"image": _address(image["uri"]), "uri": image["uri"], "generation": image["generation"]}
    return {"data": data, "predictions": [prediction]}


def _region(number: int, found: dict[str, Any], box_xyxy: Box, image: dict[str, Any]) -> dict[str, Any]:
    """A rectangle, in percent of the image."""
    (x0, y0, x1, y1), w, h = box_xyxy, image["width"], image["height"]
    share = {"x": x0 / w, "y": y0 / h, "width": (x1 - x0) / w, "height": (y1 - y0) / h}
    return {
        "id": str(number),
        "type": "rectanglelabels",
        "from_name": "label",
        "to_name": "image",
        "original_width": w,
        "original_height": h,
        "image_rotation": 0,
        "score": found["confidence"],
        "value": {**{k: round(100 * v, 4) for k, v in share.items()}, "rotation": 0, "rectanglelabels": [found["class_name"]]},
    }


def _address(uri: str) -> str:
    """Where Label Studio's server finds an image; a local file lies in its document root, which is `/` for absolute paths.

    >>> _address("gs://bucket/1.jpg"), _address("/photos/a b.jpg")
    ('gs://bucket/1.jpg', '/data/local-files/?d=photos/a%20b.jpg')
    """
    return uri if "://" in uri else f"/data/local-files/?d={quote(path_bytes(uri.lstrip('/')))}"
