"""Which row belongs to which labelled image, and which class of the model to which category of the labels.

A row has the file name of its image: with its ending where the labels name it, else without, as YOLO labels and Pascal VOC
need; the frame of a video has none. A member of an archive has the name that it has there. If several labelled images have that
name, their folders decide. A row that still fits several images is an error.
Classes are paired by name. The order of trial is: the exact name, the name without case, spaces and punctuation, then
Darknet's older names of COCO classes. If the output or the labels have only numbers for names, class id k is the k-th
category in the order of category ids, from 0, unless more detections have the id of a category: in COCO these begin at 1 and
have gaps. A model of the TensorFlow Object Detection API, whose names are the numbers of its label map from 1 (`class 18` is
class id 17), has the ids of the categories. COCO results without an image list carry the ids of the ground truth.
"""

from __future__ import annotations

import collections
import dataclasses
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from models.base.image_uris import without_ending
from models.evaluate.agreement import Match
from models.evaluate.detection_rows import ImageRow, RowsError, one_of, unpacked
from models.evaluate.ground_truth import Labels

# Darknet's coco.names spells these classes in another way than the COCO annotations
_DARKNET_NAMES = {"aeroplane": "airplane", "motorbike": "motorcycle", "sofa": "couch", "tvmonitor": "tv"}
_NUMBER = re.compile(r"(class[ _-]?)?\d*")


@dataclasses.dataclass(frozen=True)
class Pairing:
    """Rows by labelled image; images and classes are places in the lists of the labels.

    Attributes:
      labels: Their boxes are in pixels.
      rows: By image.
      unlabelled: Rows without a labelled image.
      classes: By (class name, class id) of the detections.
      classes_by: `name`, `class_id` or `category_id`.
      ignored: Detections by class that has no category.
      size_mismatches: Images whose sizes differ.
    """

    labels: Labels
    rows: Mapping[int, ImageRow]
    unlabelled: Sequence[ImageRow]
    classes: Mapping[tuple[str, int], int]
    classes_by: str
    ignored: collections.Counter[str]
    size_mismatches: int


def pair(rows: Sequence[ImageRow], labels: Labels, match: Match) -> Pairing:
    """Pairs rows with labelled images.

    Args:
      rows: Of an output.
      labels: Of `read_truth`.
      match: `name`: as above. `path`: the row's URI ends with the whole path in the labels.

    Raises:
      RowsError: A row fits several images, two rows fit one, no row fits any, or no class name is a category.
    """
    paired, unlabelled = _pair_images(rows, labels, match)
    found = collections.Counter(named for row in paired.values() for named in zip(row.class_names, row.class_ids, strict=True))
    has_ids = any(row.image_id is not None for row in paired.values())
    classes, classes_by = _pair_ids(found, labels) if has_ids else _pair_classes(found, labels)
    ignored = collections.Counter[str]()
    for (name, number), times in found.items():
        if (name, number) not in classes:
            ignored[name or str(number)] += times
    sizes_wh = np.array([(row.width, row.height) for row in paired.values()])
    theirs = labels.sizes_wh[list(paired)]
    mismatches = int(((sizes_wh != theirs).any(axis=1) & (sizes_wh[:, 0] > 0) & (theirs[:, 0] > 0)).sum())
    if classes_by == "class_id" and _only_numbers(labels.class_names):
        labels = _named_by(classes, labels)
    return Pairing(_in_pixels(labels, paired), paired, unlabelled, classes, classes_by, ignored, mismatches)


def _pair_images(rows: Sequence[ImageRow], labels: Labels, match: Match) -> tuple[dict[int, ImageRow], list[ImageRow]]:
    by_id = {image_id: place for place, image_id in enumerate(labels.image_ids)}
    by_name: dict[str, list[int]] = collections.defaultdict(list)
    for place, name in enumerate(labels.file_names):
        by_name[posixpath.basename(unpacked(name))].append(place)
    paired: dict[int, ImageRow] = {}
    unlabelled = []
    for row in rows:
        found = by_id.get(row.image_id) if row.image_id is not None else _find_image(row.uri, labels, by_name, match)
        if found is None:
            unlabelled.append(row)
        elif found in paired:
            has_folders = match == "name" and paired[found].uri != row.uri
            hint = "try --match path" if has_folders else one_of(paired[found], row)
            raise RowsError(f"two rows for one ground-truth image: {paired[found].uri} and {row.uri}; {hint}")
        else:
            paired[found] = row
    if not paired:
        few = ", ".join(row.uri or f"image_id {row.image_id}" for row in rows[:3])
        hint = "; try --match name" if match == "path" else ""
        named = ", ".join(labels.file_names[:3])
        raise RowsError(
            f"none of {len(rows)} rows is in the ground truth: the rows have {few}; the ground truth has {named}{hint}"
        )
    return paired, unlabelled


def _find_image(uri: str, labels: Labels, by_name: Mapping[str, Sequence[int]], match: Match) -> int | None:
    path = unpacked(uri)
    images = _places(without_ending(path) if labels.without_endings else path, labels, by_name, match)
    if labels.without_endings:  # of 1.jpg and 1.png in one folder, an export names the labels of the second one 1.png.txt
        images = _places(path, labels, by_name, "path") or images
    if len(images) > 1:
        named_two = " and ".join(labels.file_names[place] for place in images[:2])
        raise RowsError(f"{uri} fits {len(images)} ground-truth images: {named_two}")
    return images[0] if images else None


def _places(path: str, labels: Labels, by_name: Mapping[str, Sequence[int]], match: Match) -> Sequence[int]:
    """The places of the labelled images that an image may be."""
    images = by_name.get(posixpath.basename(path), ())
    if match == "path" or len(images) > 1:
        named = {place: unpacked(labels.file_names[place]).strip("/") for place in images}
        fitting = [place for place in images if f"/{path.strip('/')}".endswith("/" + named[place])]
        longest = max((len(named[place]) for place in fitting), default=0)
        if fitting or match == "path":
            return [place for place in fitting if len(named[place]) == longest]
    return images


def _pair_ids(found: Iterable[tuple[str, int]], labels: Labels) -> tuple[dict[tuple[str, int], int], str]:
    """Classes whose numbers are ids of categories."""
    places = labels.category_ids
    return {(name, number): places[number] for name, number in found if number in places}, "category_id"


def _pair_classes(found: collections.Counter[tuple[str, int]], labels: Labels) -> tuple[dict[tuple[str, int], int], str]:
    """The classes that have a category, by name or else by number; and how they were paired."""
    places: dict[str, int] = {}
    for spelling in (str, _plain):  # an exact name wins over a similar one
        for place, name in enumerate(labels.class_names):
            places.setdefault(spelling(name), place)
    paired = {}
    for name, number in found:
        spellings = (name, _plain(name), _DARKNET_NAMES.get(_plain(name), ""))
        known_as = next((spelling for spelling in spellings if spelling and spelling in places), None)
        if known_as is not None:
            paired[name, number] = places[known_as]
    if paired or not found:
        return paired, "name"
    names = sorted({name for name, _ in found})
    if not (_only_numbers(names) or _only_numbers(labels.class_names)):
        raise RowsError(
            f"no class of the detections is one of the labels: the detections have {', '.join(names[:5])}; "
            f"the labels have {', '.join(labels.class_names[:5])}: give both the same names"
        )
    if all(name == f"class {number + 1}" for name, number in found) and 0 not in labels.category_ids:
        by_id, how = _pair_ids([(name, number + 1) for name, number in found], labels)
        return {(name, number - 1): place for (name, number), place in by_id.items()}, how
    of_categories = [*labels.category_ids.values()]
    by_place = {(name, number): of_categories[number] for name, number in found if 0 <= number < len(of_categories)}
    by_id, how = _pair_ids(found, labels)
    of_places, of_ids = (sum(found[named] for named in classes) for classes in (by_place, by_id))
    return (by_id, how) if of_ids > of_places else (by_place, "class_id")


def _named_by(classes: Mapping[tuple[str, int], int], labels: Labels) -> Labels:
    """Labels whose classes are only numbers, with the names that the rows have for these, each once."""
    names = {place: name for (name, _), place in classes.items() if name}
    named = [names.get(place, name) for place, name in enumerate(labels.class_names)]
    times = collections.Counter(named)
    unique = [name if times[name] == 1 else f"{name} ({number})" for name, number in zip(named, labels.class_names, strict=True)]
    return dataclasses.replace(labels, class_names=unique)


def _only_numbers(names: Sequence[str]) -> bool:
    return all(_NUMBER.fullmatch(name.strip().casefold()) for name in names)


def _plain(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())


def _in_pixels(labels: Labels, rows: Mapping[int, ImageRow]) -> Labels:
    """The labels with boxes in pixels, where they are shares of the image.

    The size is that of the row. An image without a row gets the size of the first one: it has no detections, so the size only
    decides whether its objects count as small or large.
    """
    if not labels.are_shares:
        return labels
    if not all(row.width and row.height for row in rows.values()):
        raise RowsError("these labels are shares of the image, and a row has no width and height: expected both in each row")
    usual = next(iter(rows.values()))
    used = [rows.get(place, usual) for place in range(len(labels.file_names))]
    sizes_wh = np.array([(row.width, row.height) for row in used], np.float64)[labels.objects.images]
    objects = labels.objects
    scaled = dataclasses.replace(objects, xyxy=objects.xyxy * np.tile(sizes_wh, 2), areas=objects.areas * sizes_wh.prod(axis=1))
    return dataclasses.replace(labels, objects=scaled)
