"""Detections as COCO results, with the image list that gives their ids a meaning."""

from __future__ import annotations

import heapq
import json
import posixpath
from collections.abc import Iterator, Sequence
from typing import Any

from apache_beam.io.filesystems import FileSystems

from pipeline.errors import InputError
from pipeline.records import row_bytes
from pipeline.storage.files import create, read_lines
from pipeline.storage.results import COCO_IMAGES, COCO_RESULTS


def write_coco(shards: Sequence[str], staging: str, ground_truth: str | None) -> Iterator[tuple[str, str]]:
    """Writes `coco/results.json` (a list of results) and `coco/images.json` (a data set without annotations) from sorted shards.

    With `ground_truth`, image ids are those of its images with the same file name and category ids those of its categories
    with the same name; other images are left out, since a COCO evaluation refuses them. Without it, images count from 1 in
    order of their rows, and a category's id is its class id + 1.

    Args:
      shards: Paths of sorted JSON Lines files.
      staging: Folder to write to.
      ground_truth: COCO annotations, or None.

    Yields:
      (path of a written file, its final name).

    Source of the format: https://cocodataset.org/#format-results
    """
    image_ids, category_ids = _ids_of(ground_truth) if ground_truth else ({}, {})
    categories: dict[int, str] = {}
    lines = heapq.merge(*(read_lines(shard) for shard in shards))  # as text they are sorted; their URIs need not be
    rows = map(json.loads, lines)
    with (
        create(f"{staging}/{COCO_RESULTS}") as results,
        create(f"{staging}/{COCO_IMAGES}") as images,
    ):
        results.write(b"[")
        images.write(b'{"images": [')
        comma_results, comma_images, last = b"", b"", 0
        for row in rows:
            name = posixpath.basename(row["image"]["uri"])
            if ground_truth and name not in image_ids:
                continue
            last += 1
            image_id = image_ids[name] if ground_truth else last
            image = {
                "id": image_id,
                "file_name": row["image"]["uri"],
                "width": row["image"]["width"],
                "height": row["image"]["height"],
            }
            images.write(comma_images + row_bytes(image))
            comma_images = b",\n"
            for found in row["detections"]:
                category = category_ids.get(found["class_name"]) if ground_truth else found["class_id"] + 1
                if category is not None:
                    categories[category] = found["class_name"]
                    results.write(comma_results + row_bytes(_result(image_id, category, found)))
                    comma_results = b",\n"
        results.write(b"]\n")
        named = [{"id": number, "name": categories[number]} for number in sorted(categories)]
        images.write(b'],\n"annotations": [], "categories": ' + row_bytes(named) + b"}\n")
    yield f"{staging}/{COCO_RESULTS}", COCO_RESULTS
    yield f"{staging}/{COCO_IMAGES}", COCO_IMAGES


def _result(image_id: int, category_id: int, found: dict[str, Any]) -> dict[str, Any]:
    x0, y0, x1, y1 = found["box_xyxy"]
    return {
        "image_id": image_id,
        "category_id": category_id,
        "bbox": [x0, y0, round(x1 - x0, 2), round(y1 - y0, 2)],
        "score": found["confidence"],
    }


def _ids_of(path: str) -> tuple[dict[str, int], dict[str, int]]:
    try:
        with FileSystems.open(path) as file:
            truth = json.load(file)
        images = {posixpath.basename(image["file_name"]): image["id"] for image in truth["images"]}
        return images, {category["name"]: category["id"] for category in truth["categories"]}
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise InputError(
            f"coco_ground_truth {path}: expected COCO annotations with images and categories: {type(err).__name__}: {err}"
        ) from err
