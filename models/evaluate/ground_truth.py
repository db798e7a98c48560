"""Reads labels of several tools as COCO annotations: COCO, YOLO, Pascal VOC and FiftyOne's exports.

YOLO and FiftyOne give boxes as shares of the image: the result then has `normalised`, and `models.evaluate.pairing` turns
them into pixels. YOLO labels, Pascal VOC and FiftyOne name an image without its ending: the result has `without_endings`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from models.evaluate.detection_rows import RowsError, read_json
from models.evaluate.label_files import Labels, read_voc, read_yolo_dataset, read_yolo_folder

TruthSource = str | os.PathLike[str] | Mapping[str, Any]

_EXPECTED = "expected COCO annotations (.json), a folder of YOLO or Pascal VOC labels, a data.yaml, or an export of FiftyOne"


def read_truth(source: TruthSource) -> dict[str, Any]:
    """Reads labels.

    Args:
      source: A COCO file, a folder of YOLO labels (`.txt`) or of Pascal VOC (`.xml`), a `data.yaml`, a folder that FiftyOne
        exported as COCODetectionDataset or FiftyOneImageDetectionDataset, or COCO annotations.

    Returns:
      COCO annotations, each with `area` and `iscrowd`; images and categories by ascending id.

    Raises:
      RowsError: The source has no labels, or they have another form.
    """
    if isinstance(source, Mapping):
        return _checked(source)
    path = Path(source)
    if "://" in str(source):
        raise RowsError(f"ground truth {source} is not a local path: copy it here first")
    if not path.is_dir():
        return _read_file(path)
    for name in ("data.yaml", "labels.json"):
        if (path / name).is_file():
            return _read_file(path / name)
    if (path / "samples.json").is_file():
        raise RowsError(f"{path} is a FiftyOneDataset: export it as COCODetectionDataset or FiftyOneImageDetectionDataset")
    return _read_folder(path)


def _read_file(path: Path) -> dict[str, Any]:
    if path.suffix in {".yaml", ".yml"}:
        return _from_labels(*read_yolo_dataset(path))
    if path.suffix in {".txt", ".xml"}:
        raise RowsError(f"ground truth {path} is one label file: give its folder")
    content = read_json(path, "ground truth")
    is_fiftyone = isinstance(content, dict) and isinstance(content.get("labels"), dict)
    return _from_labels(*_fiftyone(content, path)) if is_fiftyone else _checked(content)


def _read_folder(folder: Path) -> dict[str, Any]:
    found = {suffix: sorted(folder.rglob(f"*{suffix}")) for suffix in (".xml", ".txt", ".json")}
    if found[".xml"] and found[".txt"]:
        raise RowsError(f"{folder} has .xml and .txt files: give a folder with the labels of one tool")
    if found[".xml"]:
        return _from_labels(*read_voc(folder, found[".xml"]))
    if found[".txt"]:
        return _from_labels(*read_yolo_folder(folder, found[".txt"]))
    hint = f"; {found['.json'][0]} may be meant" if found[".json"] else ""
    raise RowsError(f"ground truth {folder} holds no labels: {_EXPECTED}{hint}")


def _fiftyone(content: Mapping[str, Any], path: Path) -> tuple[list[Labels], list[str], bool]:
    """The labels of a FiftyOneImageDetectionDataset: `label` is an index of `classes`, or a name where there is no such list.

    A key is the name of an image without ending, or its absolute path if the export has no images.

    https://docs.voxel51.com/user_guide/export_datasets.html#fiftyoneimagedetectiondataset
    """
    try:
        names = [str(name) for name in content.get("classes") or ()]
        listed = {image: objects or () for image, objects in content["labels"].items()}
        if not names:
            names = sorted({str(one["label"]) for objects in listed.values() for one in objects})
            numbers: Mapping[Any, int] = {name: number for number, name in enumerate(names)}
        else:
            numbers = {number: number for number in range(len(names))}
        labels = [
            Labels(
                _without_ending(image),
                0,
                0,
                [(numbers[one["label"]], [float(v) for v in one["bounding_box"]], False) for one in objects],
            )
            for image, objects in listed.items()
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise RowsError(f"{path}: expected FiftyOne's classes and labels, got {type(err).__name__}: {err}") from err
    return labels, names, True


def _without_ending(key: str) -> str:
    return os.path.splitext(key)[0] if os.path.isabs(key) else key


def _from_labels(labels: Iterable[Labels], names: list[str], normalised: bool) -> dict[str, Any]:
    """COCO annotations of label files."""
    labels = list(labels)
    annotations: list[dict[str, Any]] = [
        {"image_id": image_id, "category_id": number, "bbox": box, "iscrowd": int(ignored)}
        for image_id, one in enumerate(labels)
        for number, box, ignored in one.objects
    ]
    images = [{"id": i, "file_name": one.image, "width": one.width, "height": one.height} for i, one in enumerate(labels)]
    # without names the class id is the name
    most = max((one["category_id"] for one in annotations), default=0)
    categories = [{"id": i, "name": name} for i, name in enumerate(names or map(str, range(most + 1)))]
    if most >= len(categories):
        raise RowsError(f"the labels have class {most}, and only {len(categories)} names: {', '.join(names[:5])}")
    content = {"images": images, "annotations": annotations, "categories": categories}
    return {**_checked(content), "normalised": normalised, "without_endings": True}


def _checked(content: Any) -> dict[str, Any]:
    if not isinstance(content, Mapping) or not all(
        isinstance(content.get(key), list) for key in ("images", "annotations", "categories")
    ):
        raise RowsError("ground truth: expected COCO annotations with the lists images, annotations and categories")
    try:
        annotations = []
        for one in content["annotations"]:
            _, _, width, height = one["bbox"]
            if not all(map(math.isfinite, one["bbox"])):
                raise ValueError("a box of no finite numbers")
            needed = {"image_id": one["image_id"], "category_id": one["category_id"]}
            annotations.append({"iscrowd": 0, "area": width * height, **one, **needed})
        images = [{**image, "id": image["id"], "file_name": str(image["file_name"])} for image in content["images"]]
        categories = [{**category, "id": category["id"], "name": str(category["name"])} for category in content["categories"]]
        by_id = [sorted(listed, key=lambda one: one["id"]) for listed in (images, categories)]
    except (KeyError, TypeError, ValueError) as err:
        raise RowsError(
            f"ground truth: expected COCO images, annotations and categories, got {type(err).__name__}: {err}"
        ) from err
    if not images or not categories:
        raise RowsError("ground truth: expected at least one image and one category")
    return {"images": by_id[0], "annotations": annotations, "categories": by_id[1]}
