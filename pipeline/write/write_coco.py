"""Detections as COCO results, with the image list that their ids refer to."""

from __future__ import annotations

import dataclasses
import json
import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from models.image_uris import archive_member
from pipeline.errors import InputError
from pipeline.records import row_bytes
from pipeline.results.layout import COCO_IMAGES, COCO_RESULTS
from pipeline.storage.files import create, read_file

_SHOWN = 5  # names of classes


@dataclasses.dataclass(frozen=True)
class GroundTruth:
    """The ids in COCO annotations.

    Attributes:
      image_ids: By file name without its folder or archive.
      category_ids: By class name.
    """

    image_ids: Mapping[str, int]
    category_ids: Mapping[str, int]


def read_ground_truth(path: str) -> GroundTruth:
    """Reads the ids of COCO annotations.

    Raises:
      InputError: The file has no COCO annotations.
    """
    try:
        truth = json.loads(read_file(path))
        images = {_file_name(image["file_name"]): image["id"] for image in truth["images"]}
        return GroundTruth(images, {category["name"]: category["id"] for category in truth["categories"]})
    except Exception as err:
        raise InputError(
            f"coco_ground_truth {path}: expected COCO annotations with images and categories: {type(err).__name__}: {err}"
        ) from err


class LeftOut(NamedTuple):
    """Images and detections that the ids of a ground truth leave out or confuse.

    Attributes:
      images: Images that the ground truth does not have.
      detections: Detections of classes that it does not have, in images that it has.
      classes: The names of these classes, sorted.
      same_name: Images with the name, and so the id, of another image of this run.
    """

    images: int = 0
    detections: int = 0
    classes: tuple[str, ...] = ()
    same_name: int = 0

    def notes(self, truth: str) -> Iterator[str]:
        """Lines for the user."""
        if self.images:
            yield f"coco/ leaves out {self.images} images that {truth} does not name"
        if self.detections:
            named = ", ".join(self.classes[:_SHOWN]) + (", …" if len(self.classes) > _SHOWN else "")
            yield f"coco/ leaves out {self.detections} objects of classes that {truth} does not name: {named}"
        if self.same_name:
            yield f"coco/ has {self.same_name} images under the id of another one, since {truth} tells them by file name alone"


def write_coco(rows: Iterable[dict[str, Any]], folder: str, truth: GroundTruth | None = None) -> LeftOut:
    """Writes `coco/results.json` (a list of results) and `coco/images.json` (a data set without annotations), as rows come.

    With a ground truth, image ids are those of its images with the same file name and category ids those of its categories
    with the same name; other images are left out, since a COCO evaluation refuses them. Without it, images count from 1 in
    order of their rows, and a category's id is its class id + 1.

    Args:
      rows: JSON rows of detections.
      folder: The folder of `coco/`.
      truth: The ids to use.

    Returns:
      What was left out.

    Source of the format: https://cocodataset.org/#format-results
    """
    categories: dict[int, str] = {}
    number, left_out, same_name, seen = 0, 0, 0, set[int]()
    unknown: Counter[str] = Counter()
    with create(f"{folder}/{COCO_RESULTS}") as results_file, create(f"{folder}/{COCO_IMAGES}") as images_file:
        results, images = JsonList(results_file, b"["), JsonList(images_file, b'{"images": [')
        for row in rows:
            name = _file_name(row["image"]["uri"])
            if truth and name not in truth.image_ids:
                left_out += 1
                continue
            number += 1
            image_id = truth.image_ids[name] if truth else number
            if truth:
                same_name += image_id in seen
                seen.add(image_id)
            size = {"width": row["image"]["width"], "height": row["image"]["height"]}
            images.add({"id": image_id, "file_name": row["image"]["uri"], **size})
            for found in row["detections"]:
                category = truth.category_ids.get(found["class_name"]) if truth else found["class_id"] + 1
                if category is None:
                    unknown[found["class_name"]] += 1
                else:
                    categories[category] = found["class_name"]
                    results.add(_result(image_id, category, found))
        results_file.write(b"]\n")
        named = [{"id": category, "name": categories[category]} for category in sorted(categories)]
        images_file.write(b'],\n"annotations": [], "categories": ' + row_bytes(named) + b"}\n")
    return LeftOut(left_out, unknown.total(), tuple(sorted(unknown)), same_name)


def _file_name(uri: str) -> str:
    """The name without its folder; that of an archive's member is the one that it has there."""
    _, member = archive_member(uri) or ("", None)
    return posixpath.basename(member or uri)


class JsonList:
    """A JSON list that is written element by element."""

    def __init__(self, file: Any, beginning: bytes):
        self._file = file
        file.write(beginning)
        self._comma = b""

    def add(self, element: Any) -> None:
        """Writes one more element."""
        self._file.write(self._comma + row_bytes(element))
        self._comma = b",\n"


def _result(image_id: int, category_id: int, found: dict[str, Any]) -> dict[str, Any]:
    x0, y0, x1, y1 = found["box_xyxy"]
    return {
        "image_id": image_id,
        "category_id": category_id,
        "bbox": [x0, y0, round(x1 - x0, 2), round(y1 - y0, 2)],
        "score": found["confidence"],
    }
