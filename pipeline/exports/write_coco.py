"""Detections as COCO results, with the image list that their ids refer to."""

from __future__ import annotations

import json
import posixpath
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

from models.base.image_uris import archive_member
from pipeline.errors import InputError
from pipeline.exports.data_set import WHOLE_NAMES, DataSet, clip
from pipeline.log_lines import plural
from pipeline.records import row_bytes
from pipeline.storage.files import read_file

_SHOWN = 5  # names of classes


def write_coco(
    rows: Iterable[dict[str, Any]],
    results_file: BinaryIO,
    images_file: BinaryIO,
    annotations_file: BinaryIO,
    *,
    data_set: DataSet = WHOLE_NAMES,
    ground_truth: str = "",
) -> Sequence[str]:
    """Writes a list of results, a data set of their images without annotations, and one with them, as rows come.

    With a ground truth, image ids are those of its images with the same file name and category ids those of its categories
    with the same name; other images are left out, since a COCO evaluation refuses them. Without it, images count from 1 in
    order of their rows, and a category's id is its class id + 1.

    Args:
      rows: JSON rows of detections.
      results_file: Gets `coco/results.json`: all boxes with their confidences.
      images_file: Gets `coco/images.json`.
      annotations_file: Gets `coco/annotations.json`: the boxes as labels, clipped to the images.
      data_set: From where names of images count, and all classes.
      ground_truth: COCO annotations whose ids are used.

    Returns:
      Lines for the user: what the ids of the ground truth leave out or confuse.

    Raises:
      InputError: The ground truth has no COCO annotations.

    Source of the format: https://cocodataset.org/#format-results
    """
    image_ids, category_ids = _ids_of(ground_truth) if ground_truth else ({}, {})
    categories = {number + 1: name for number, name in data_set.class_names.items()} if not ground_truth else {}
    written: Counter[int] = Counter()
    left_out, unknown = 0, Counter[str]()
    results, annotations = JsonList(results_file, b"["), JsonList(annotations_file, b'{"annotations": [')
    with tempfile.TemporaryFile() as listed:
        images = JsonList(listed, b'"images": [')
        for number, row in enumerate(rows, 1):
            image = row["image"]
            image_id = image_ids.get(_file_name(image["uri"])) if ground_truth else number
            if image_id is None:
                left_out += 1
                continue
            if ground_truth:
                written[image_id] += 1
            name = data_set.name_of(image["uri"])
            images.add({"id": image_id, "file_name": name, "width": image["width"], "height": image["height"]})
            for found in row["detections"]:
                category = category_ids.get(found["class_name"]) if ground_truth else found["class_id"] + 1
                if category is None:
                    unknown[found["class_name"]] += 1
                    continue
                categories[category] = found["class_name"]
                of_image = {"image_id": image_id, "category_id": category}
                results.add({**of_image, "bbox": _xywh(found["box_xyxy"]), "score": found["confidence"]})
                if box := clip(found["box_xyxy"], image):
                    x, y, w, h = _xywh(box)
                    label = {**of_image, "bbox": [x, y, w, h], "area": round(w * h, 2), "iscrowd": 0}
                    annotations.add({"id": annotations.length + 1, **label})
        named = [{"id": category, "name": name} for category, name in sorted(categories.items())]
        end = b'],\n"categories": ' + row_bytes(named) + b"}\n"
        results_file.write(b"]\n")
        for file, beginning in ((images_file, b'{"annotations": [],\n'), (annotations_file, b"],\n")):
            listed.seek(0)
            file.write(beginning)
            shutil.copyfileobj(listed, file)
            file.write(end)
    classes = ", ".join(sorted(unknown)[:_SHOWN]) + ", …" * (len(unknown) > _SHOWN)
    duplicates = written.total() - len(written)
    notes = {
        f"leaves out {plural(left_out, 'image')} that {ground_truth} does not name": left_out,
        f"leaves out {plural(unknown.total(), 'object')} of classes that {ground_truth} does not name: {classes}": unknown,
        f"has {plural(duplicates, 'image')} under the id of another, since {ground_truth} tells them by file name": duplicates,
    }
    return [f"coco/ {note}" for note, holds in notes.items() if holds]


def _xywh(box_xyxy: Sequence[float]) -> list[float]:
    x0, y0, x1, y1 = box_xyxy
    return [x0, y0, round(x1 - x0, 2), round(y1 - y0, 2)]


def _ids_of(ground_truth: str) -> tuple[dict[str, int], dict[str, int]]:
    """The ids of images by file name without folder or archive, and of categories by name."""
    try:
        truth = json.loads(read_file(ground_truth))
        images = {_file_name(image["file_name"]): image["id"] for image in truth["images"]}
        return images, {category["name"]: category["id"] for category in truth["categories"]}
    except Exception as err:
        raise InputError(
            f"coco_ground_truth {ground_truth}: expected COCO annotations with images and categories: {type(err).__name__}: {err}"
        ) from err


def _file_name(uri: str) -> str:
    """The name without its folder; that of an archive's member is the one that it has there."""
    _, member = archive_member(uri) or ("", None)
    return posixpath.basename(member or uri)


class JsonList:
    """A JSON list that is written element by element.

    Attributes:
      length: The number of its elements.
    """

    def __init__(self, file: BinaryIO, beginning: bytes):
        self._file = file
        file.write(beginning)
        self.length = 0

    def add(self, element: Any) -> None:
        """Writes one more element."""
        self._file.write((b",\n" if self.length else b"") + row_bytes(element))
        self.length += 1
