"""COCO average precision of an output against COCO ground truth, computed by pycocotools.

Images are matched by file name, with or without folders. Classes are matched by name. The order of trial is: the exact name,
the name without case, spaces and punctuation, then Darknet's older names of COCO classes. If no class name of an output is the
name of a category, class id k means the k-th category in the order of category ids, from 0. COCO results without an image list
beside them carry the ids of the ground truth.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.evaluate.agreement import Match
from models.evaluate.detection_rows import ImageRow, RowsError, Source, read_json, read_rows

# in the order of COCOeval.stats: https://cocodataset.org/#detection-eval
FIGURES = {
    "AP": "AP at IoU 0.50:0.95",
    "AP50": "AP at IoU 0.50",
    "AP75": "AP at IoU 0.75",
    "AP_small": "AP, objects up to 32x32 pixels",
    "AP_medium": "AP, objects up to 96x96 pixels",
    "AP_large": "AP, larger objects",
    "AR_1": "AR with 1 detection per image",
    "AR_10": "AR with 10 detections per image",
    "AR_100": "AR with 100 detections per image",
    "AR_small": "AR, objects up to 32x32 pixels",
    "AR_medium": "AR, objects up to 96x96 pixels",
    "AR_large": "AR, larger objects",
}
# Darknet's coco.names spells these classes in another way than the COCO annotations
_DARKNET_NAMES = {"aeroplane": "airplane", "motorbike": "motorcycle", "sofa": "couch", "tvmonitor": "tv"}


@dataclasses.dataclass(frozen=True)
class _Matching:
    """Which row belongs to which ground-truth image, and which class to which category."""

    rows: dict[int, ImageRow]
    rows_without_ground_truth: int
    categories: dict[tuple[str, int], int]
    classes_by: str


def evaluate(
    detections: Source, ground_truth: str | os.PathLike[str] | Mapping[str, Any], *, match: Match = "name"
) -> dict[str, Any]:
    """Computes COCO's twelve figures and the AP of each class.

    Args:
      detections: An output; see `models.evaluate.detection_rows.read_rows`.
      ground_truth: COCO annotations, or the file that holds them.
      match: `name`: by file name without folders. `path`: the row's URI ends with the ground truth's `file_name`.

    Returns:
      The keys of `FIGURES` (in 0..1; None if the ground truth has no such object) and `per_class`, the AP by category name. The
      other keys describe the matching: `images` of the ground truth, `images_without_row` (they count as images without
      detections), `rows_without_ground_truth` (ignored), `detections` that count, `detections_ignored` by class without a
      category, `classes_by` (`name`, `class_id` or `category_id`), and `size_mismatches`, images whose sizes differ.

    Raises:
      RowsError: A file cannot be read, a row fits several images, or no row fits any.
    """
    truth = _load_truth(ground_truth)
    matching = _match(read_rows(detections), truth, match)
    annotations, ignored = _annotations(matching)
    figures, per_class = _average_precision(truth, annotations)
    images = {image["id"]: image for image in truth["images"]}
    mismatches = sum(
        bool(row.width and images[i].get("width")) and (row.width, row.height) != (images[i]["width"], images[i].get("height"))
        for i, row in matching.rows.items()
    )
    return {
        **figures,
        "per_class": per_class,
        "images": len(images),
        "images_without_row": len(images) - len(matching.rows),
        "rows_without_ground_truth": matching.rows_without_ground_truth,
        "detections": len(annotations),
        "detections_ignored": dict(ignored.most_common()),
        "classes_by": matching.classes_by,
        "size_mismatches": mismatches,
    }


def _load_truth(ground_truth: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    content = ground_truth if isinstance(ground_truth, Mapping) else read_json(ground_truth, "ground truth")
    if not isinstance(content, Mapping) or not all(
        isinstance(content.get(key), list) for key in ("images", "annotations", "categories")
    ):
        raise RowsError("ground truth: expected COCO annotations with the lists images, annotations and categories")
    try:
        annotations = []
        for number, one in enumerate(content["annotations"], 1):
            _, _, width, height = one["bbox"]
            # ids from 1: pycocotools takes 0 for "no match"
            needed = {"id": number, "image_id": one["image_id"], "category_id": one["category_id"]}
            annotations.append({"iscrowd": 0, "area": width * height, **one, **needed})
        images = [{**image, "id": image["id"], "file_name": str(image["file_name"])} for image in content["images"]]
        categories = [{**category, "id": category["id"], "name": str(category["name"])} for category in content["categories"]]
    except (KeyError, TypeError, ValueError) as err:
        raise RowsError(
            f"ground truth: expected COCO images, annotations and categories, got {type(err).__name__}: {err}"
        ) from err
    if not images or not categories:
        raise RowsError("ground truth: expected at least one image and one category")
    return {"images": images, "annotations": annotations, "categories": sorted(categories, key=lambda category: category["id"])}


def _match(rows: Sequence[ImageRow], truth: Mapping[str, Any], match: Match) -> _Matching:
    ids = {image["id"] for image in truth["images"]}
    by_key: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
    for image in truth["images"]:
        file_name = image["file_name"].strip("/")
        by_key[file_name.rpartition("/")[2] if match == "name" else file_name].append(image)
    matched: dict[int, ImageRow] = {}
    for row in rows:
        found = _image_id(row, ids, by_key, match)
        if found in matched:
            hint = "; try --match path" if match == "name" and matched[found].uri != row.uri else "; each image may have one row"
            raise RowsError(f"two rows for one ground-truth image: {matched[found].uri} and {row.uri}{hint}")
        if found is not None:
            matched[found] = row
    if not matched:
        few = ", ".join(row.uri or f"image_id {row.image_id}" for row in rows[:3])
        truths = ", ".join(image["file_name"] for image in truth["images"][:3])
        hint = "; try --match name" if match == "path" else ""
        raise RowsError(
            f"none of {len(rows)} rows is in the ground truth: the rows have {few}; the ground truth has {truths}{hint}"
        )
    categories, classes_by = _match_classes(list(matched.values()), truth["categories"])
    return _Matching(matched, len(rows) - len(matched), categories, classes_by)


def _image_id(row: ImageRow, ids: set[Any], by_key: Mapping[str, list[Mapping[str, Any]]], match: Match) -> Any:
    """The id of the ground-truth image of a row; None if there is none."""
    if row.image_id is not None:
        return row.image_id if row.image_id in ids else None
    parts = row.uri.strip("/").split("/")
    keys = [row.name] if match == "name" else ["/".join(parts[first:]) for first in range(len(parts))]
    for key in keys:
        images = by_key.get(key, [])
        if len(images) > 1:
            named = " and ".join(image["file_name"] for image in images[:2])
            hint = "; try --match path" if match == "name" else ""
            raise RowsError(f"{row.uri} fits {len(images)} ground-truth images: {named}{hint}")
        if images:
            return images[0]["id"]
    return None


def _match_classes(rows: Sequence[ImageRow], categories: Sequence[Mapping[str, Any]]) -> tuple[dict[tuple[str, int], int], str]:
    """Category ids by (class name, class id), without classes that have no category; and how they were matched."""
    classes = {named for row in rows for named in zip(row.class_names, row.class_ids, strict=True)}
    if any(row.image_id is not None for row in rows):
        known = {category["id"] for category in categories}
        return {(name, number): number for name, number in classes if number in known}, "category_id"
    ids: dict[str, int] = {}
    for spelling in (str, _plain):  # an exact name wins over a similar one
        for category in categories:
            ids.setdefault(spelling(category["name"]), category["id"])
    found = {}
    for name, number in classes:
        spellings = (name, _plain(name), _DARKNET_NAMES.get(_plain(name), ""))
        known_as = next((spelling for spelling in spellings if spelling in ids), None)
        if known_as is not None:
            found[name, number] = ids[known_as]
    if found or not classes:
        return found, "name"
    in_order = [category["id"] for category in categories]
    return {(name, number): in_order[number] for name, number in classes if 0 <= number < len(in_order)}, "class_id"


def _plain(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())


def _annotations(matching: _Matching) -> tuple[list[dict[str, Any]], collections.Counter[str]]:
    """The detections as COCO results, and the number of detections of each class without a category."""
    annotations: list[dict[str, Any]] = []
    ignored: collections.Counter[str] = collections.Counter()
    for image_id, row in matching.rows.items():
        for (x0, y0, x1, y1), score, name, number in zip(
            row.boxes_xyxy.tolist(), row.scores.tolist(), row.class_names, row.class_ids, strict=True
        ):
            category_id = matching.categories.get((name, number))
            if category_id is None:
                ignored[name or str(number)] += 1
                continue
            box_xywh = [x0, y0, x1 - x0, y1 - y0]
            annotations.append({"image_id": image_id, "category_id": category_id, "score": score, "bbox": box_xywh})
    return annotations, ignored


def _average_precision(
    truth: dict[str, Any], annotations: list[dict[str, Any]]
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """COCO's figures and the AP by category name; None for COCO's -1 (no such object)."""
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as err:
        raise RowsError(f"average precision needs pycocotools (pip install pycocotools): {err}") from err
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        expected = COCO()
        expected.dataset = truth
        expected.createIndex()
        evaluation = COCOeval(expected, expected.loadRes(annotations) if annotations else COCO(), iouType="bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    figures = {key: _or_none(value) for key, value in zip(FIGURES, evaluation.stats, strict=True)}
    names = {category["id"]: category["name"] for category in truth["categories"]}
    per_class = {}
    for index, category_id in enumerate(evaluation.params.catIds):
        precision = evaluation.eval["precision"][:, :, index, 0, -1]  # IoU thresholds x recalls, all areas, most detections
        per_class[names[category_id]] = _or_none(np.mean(precision[precision > -1]) if (precision > -1).any() else -1)
    return figures, per_class


def _or_none(value: float) -> float | None:
    return float(value) if value > -1 and math.isfinite(value) else None
