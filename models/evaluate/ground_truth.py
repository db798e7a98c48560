"""Reads labels of several tools as COCO annotations: COCO, YOLO and Pascal VOC.

YOLO gives boxes as shares of the image: the result then has `normalised`, and `models.evaluate.pairing` turns them into pixels.
YOLO labels and Pascal VOC name an image without its ending: the result has `without_endings`.
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

_EXPECTED = "expected COCO annotations (.json), a folder of YOLO or Pascal VOC labels, or a data.yaml"


def read_truth(source: TruthSource) -> dict[str, Any]:
    """Reads labels.

    Args:
      source: A COCO file, a folder of YOLO labels (`.txt`) or of Pascal VOC (`.xml`), a `data.yaml`, a folder that FiftyOne
        exported as COCODetectionDataset, or COCO annotations.

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
        raise RowsError(f"{path} is a FiftyOneDataset: export it as COCODetectionDataset")
    return _read_folder(path)


def _read_file(path: Path) -> dict[str, Any]:
    if path.suffix in {".yaml", ".yml"}:
        return _from_labels(*read_yolo_dataset(path))
    if path.suffix in {".txt", ".xml"}:
        raise RowsError(f"ground truth {path} is one label file: give its folder")
    return _checked(read_json(path, "ground truth"))


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
