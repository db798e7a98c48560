"""Which row belongs to which labelled image, and which class of the model to which category of the labels.

A row has the file name of its image: with its ending where the labels name it, else without, as YOLO labels and Pascal VOC
need; the frame of a video has none. A member of an archive has the name that it has there. If several labelled images have that
name, their folders decide. A row that still fits several images is an error.
Classes are paired by name. The order of trial is: the exact name, the name without case, spaces and punctuation, then
Darknet's older names of COCO classes. If the output or the labels have only numbers for names, class id k is the k-th
category in the order of category ids, from 0; but a model of the TensorFlow Object Detection API, whose names are the numbers
of its label map from 1 (`class 18` is class id 17), has the ids of the categories, which in COCO have gaps. COCO results
without an image list carry the ids of the ground truth.
"""

from __future__ import annotations

import collections
import dataclasses
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

from models.evaluate.agreement import Match
from models.evaluate.detection_rows import ImageRow, RowsError, unpacked

# Darknet's coco.names spells these classes in another way than the COCO annotations
_DARKNET_NAMES = {"aeroplane": "airplane", "motorbike": "motorcycle", "sofa": "couch", "tvmonitor": "tv"}
_FRAME = re.compile(r"#t=\d+\.\d+$")
_NUMBER = re.compile(r"(class[ _-]?)?\d*")


@dataclasses.dataclass(frozen=True)
class Pairing:
    """Rows by labelled image.

    Attributes:
      truth: COCO annotations in pixels.
      rows: By image id.
      unlabelled: Rows without a labelled image.
      categories: Category ids by (class name, class id).
      classes_by: `name`, `class_id` or `category_id`.
      ignored: Detections by class that has no category.
      size_mismatches: Images whose sizes differ.
    """

    truth: Mapping[str, Any]
    rows: Mapping[Any, ImageRow]
    unlabelled: Sequence[ImageRow]
    categories: Mapping[tuple[str, int], Any]
    classes_by: str
    ignored: collections.Counter[str]
    size_mismatches: int


def pair(rows: Sequence[ImageRow], truth: Mapping[str, Any], match: Match) -> Pairing:
    """Pairs rows with labelled images.

    Args:
      rows: Of an output.
      truth: Of `read_truth`.
      match: `name`: as above. `path`: the row's URI ends with the whole path in the labels.

    Raises:
      RowsError: A row fits several images, two rows fit one, no row fits any, or no class name is a category.
    """
    paired, unlabelled = _pair_images(rows, truth, match)
    categories, classes_by = _pair_classes(list(paired.values()), truth["categories"])
    ignored = collections.Counter(
        name or str(number)
        for row in paired.values()
        for name, number in zip(row.class_names, row.class_ids, strict=True)
        if (name, number) not in categories
    )
    return Pairing(_in_pixels(truth, paired), paired, unlabelled, categories, classes_by, ignored, _other_sizes(truth, paired))


def _pair_images(rows: Sequence[ImageRow], truth: Mapping[str, Any], match: Match) -> tuple[dict[Any, ImageRow], list[ImageRow]]:
    ids = {image["id"] for image in truth["images"]}
    by_name: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
    for image in truth["images"]:
        by_name[posixpath.basename(unpacked(image["file_name"]))].append(image)
    paired: dict[Any, ImageRow] = {}
    unlabelled = []
    for row in rows:
        found = _image_id(row, ids, by_name, match, bool(truth.get("without_endings")))
        if found is None:
            unlabelled.append(row)
        elif found in paired:
            raise _two_rows(paired[found], row, match)
        else:
            paired[found] = row
    if not paired:
        few = ", ".join(row.uri or f"image_id {row.image_id}" for row in rows[:3])
        truths = ", ".join(image["file_name"] for image in truth["images"][:3])
        hint = "; try --match name" if match == "path" else ""
        raise RowsError(
            f"none of {len(rows)} rows is in the ground truth: the rows have {few}; the ground truth has {truths}{hint}"
        )
    return paired, unlabelled


def _two_rows(one: ImageRow, other: ImageRow, match: Match) -> RowsError:
    hint = (
        "; try --match path"
        if match == "name" and one.uri != other.uri
        else "; each image may have one row: of several runs give one"
    )
    return RowsError(f"two rows for one ground-truth image: {one.uri} and {other.uri}{hint}")


def _image_id(
    row: ImageRow, ids: set[Any], by_name: Mapping[str, list[Mapping[str, Any]]], match: Match, without_endings: bool
) -> Any:
    """The id of the labelled image of a row; None if there is none."""
    if row.image_id is not None:
        return row.image_id if row.image_id in ids else None
    uri = unpacked(row.uri)
    path = "/" + (posixpath.splitext(uri)[0] if without_endings and not _FRAME.search(uri) else uri).strip("/")
    images = by_name.get(posixpath.basename(path), [])
    if match == "path" or len(images) > 1:
        of_folder = [image for image in images if path.endswith("/" + unpacked(image["file_name"]).strip("/"))]
        longest = max((len(image["file_name"]) for image in of_folder), default=0)
        fitting = [image for image in of_folder if len(image["file_name"]) == longest]
        images = fitting if fitting or match == "path" else images
    if len(images) > 1:
        named = " and ".join(image["file_name"] for image in images[:2])
        raise RowsError(f"{row.uri} fits {len(images)} ground-truth images: {named}")
    return images[0]["id"] if images else None


def _pair_classes(rows: Sequence[ImageRow], categories: Sequence[Mapping[str, Any]]) -> tuple[dict[tuple[str, int], Any], str]:
    """Category ids by (class name, class id), without classes that have no category; and how they were paired."""
    classes = {named for row in rows for named in zip(row.class_names, row.class_ids, strict=True)}
    if any(row.image_id is not None for row in rows):
        known = {category["id"] for category in categories}
        return {(name, number): number for name, number in classes if number in known}, "category_id"
    ids: dict[str, Any] = {}
    for spelling in (str, _plain):  # an exact name wins over a similar one
        for category in categories:
            ids.setdefault(spelling(category["name"]), category["id"])
    found = {}
    for name, number in classes:
        spellings = (name, _plain(name), _DARKNET_NAMES.get(_plain(name), ""))
        known_as = next((spelling for spelling in spellings if spelling and spelling in ids), None)
        if known_as is not None:
            found[name, number] = ids[known_as]
    if found or not classes:
        return found, "name"
    names, their_names = sorted({name for name, _ in classes}), [category["name"] for category in categories]
    if not (_only_numbers(names) or _only_numbers(their_names)):
        raise RowsError(
            f"no class of the detections is one of the labels: the detections have {', '.join(names[:5])}; "
            f"the labels have {', '.join(their_names[:5])}: give both the same names"
        )
    in_order = [category["id"] for category in categories]
    if all(name == f"class {number + 1}" for name, number in classes) and 0 not in in_order:
        return {(name, number): number + 1 for name, number in classes if number + 1 in in_order}, "category_id"
    return {(name, number): in_order[number] for name, number in classes if 0 <= number < len(in_order)}, "class_id"


def _only_numbers(names: Sequence[str]) -> bool:
    return all(_NUMBER.fullmatch(name.strip().casefold()) for name in names)


def _plain(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())


def _in_pixels(truth: Mapping[str, Any], rows: Mapping[Any, ImageRow]) -> Mapping[str, Any]:
    """The ground truth with boxes in pixels, where its boxes are shares of the image.

    The size is that of the row. An image without a row gets the size of the first one: it has no detections, so the size only
    decides whether its objects count as small or large.
    """
    if not truth.get("normalised"):
        return truth
    sizes = {image_id: (row.width, row.height) for image_id, row in rows.items() if row.width and row.height}
    if len(sizes) < len(rows):
        raise RowsError("these labels are shares of the image, and a row has no width and height: expected both in each row")
    usual = next(iter(sizes.values()))
    annotations = []
    for one in truth["annotations"]:
        (w, h), (x, y, box_w, box_h) = sizes.get(one["image_id"], usual), one["bbox"]
        box = [x * w, y * h, box_w * w, box_h * h]
        annotations.append({**one, "bbox": box, "area": box[2] * box[3]})
    return {**truth, "annotations": annotations}


def _other_sizes(truth: Mapping[str, Any], rows: Mapping[Any, ImageRow]) -> int:
    images = {image["id"]: image for image in truth["images"]}
    return sum(
        bool(row.width and images[i].get("width")) and (row.width, row.height) != (images[i]["width"], images[i].get("height"))
        for i, row in rows.items()
    )
