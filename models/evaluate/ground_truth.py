"""Reads labels of several tools: COCO annotations, YOLO's `.txt` and Pascal VOC's `.xml` files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from models.base.image_uris import without_ending
from models.base.progress import shown
from models.base.project import pip_install
from models.class_names import read_class_names
from models.evaluate.coco_matching import Boxes, Ints
from models.evaluate.detection_rows import RowsError, read_json
from models.geometry import boxes_to_xyxy

TruthSource = str | os.PathLike[str] | Mapping[str, Any]

_IMAGE_ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".heic", ".avif", ".jp2"}
_NAME_FILES = ("classes.txt", "obj.names", "classes.names")


@dataclasses.dataclass(frozen=True, eq=False)
class Labels:
    """Labelled images.

    Attributes:
      image_ids: Ids of the images in COCO results.
      file_names: Their paths.
      sizes_wh: `(images, 2)` pixels; 0 if unknown.
      category_ids: Ids of the categories in COCO results, ascending, each with the place of its class.
      class_names: Names of the classes, each once: categories of one name are one class.
      objects: The objects, whose images and classes are places in these lists.
      are_shares: Whether boxes are shares of the image, as those of YOLO.
      without_endings: Whether file names have no ending, as those of YOLO and Pascal VOC.
    """

    image_ids: Sequence[Any]
    file_names: Sequence[str]
    sizes_wh: Ints
    category_ids: Mapping[Any, int]
    class_names: Sequence[str]
    objects: Boxes
    are_shares: bool = False
    without_endings: bool = False


class _Object(NamedTuple):
    """A labelled object: its class, a number or a name; its box; whether it counts neither as found nor as missed."""

    named: Any
    xywh: Sequence[float]
    is_crowd: bool = False


class _File(NamedTuple):
    """The labels of one image, whose path has no ending."""

    image: str
    objects: list[_Object]
    size_wh: tuple[int, int] = (0, 0)


def read_truth(source: TruthSource) -> Labels:
    """Reads labels.

    Args:
      source: A COCO file, a folder of YOLO labels (`.txt`) or of Pascal VOC (`.xml`), a `data.yaml`, a folder that FiftyOne
        exported as COCODetectionDataset, or COCO annotations.

    Raises:
      RowsError: The source has no labels, or they have another form.
    """
    if isinstance(source, Mapping):
        return _coco(source)
    path = Path(source)
    if "://" in str(source):
        raise RowsError(f"ground truth {source} is not a local path: copy it here first")
    path = next((path / name for name in ("data.yaml", "labels.json") if (path / name).is_file()), path)
    if path.is_dir():
        return _folder(path)
    if path.suffix in {".yaml", ".yml"}:
        return _yolo_dataset(path)
    if path.suffix in {".txt", ".xml"}:
        raise RowsError(f"ground truth {path} is one label file: give its folder")
    return _coco(read_json(path, "ground truth"))


def _coco(content: Any) -> Labels:
    try:
        images, categories = (sorted(content[key], key=lambda one: one["id"]) for key in ("images", "categories"))
        places = {image["id"]: n for n, image in enumerate(images)}
        classes, names = _merged((one["id"], str(one["name"])) for one in categories)
        known = [one for one in content["annotations"] if one["image_id"] in places and one["category_id"] in classes]
        labels = Labels(
            image_ids=[image["id"] for image in images],
            file_names=[str(image["file_name"]) for image in images],
            sizes_wh=np.array([(image.get("width") or 0, image.get("height") or 0) for image in images], np.int64),
            category_ids=classes,
            class_names=names,
            objects=_boxes(
                [places[one["image_id"]] for one in known],
                [classes[one["category_id"]] for one in known],
                [one["bbox"] for one in known],
                [bool(one.get("iscrowd")) for one in known],
                [one.get("area") for one in known],
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        wanted = "expected COCO annotations with the lists images, annotations and categories"
        raise RowsError(f"ground truth: {wanted}, got {type(err).__name__}: {err}") from err
    if not images or not categories:
        raise RowsError("ground truth: expected at least one image and one category")
    return labels


def _merged(categories: Iterable[tuple[Any, str]]) -> tuple[dict[Any, int], list[str]]:
    """The place of the class of each category, and the names of the classes; those without a name have their ids.

    >>> _merged([(1, "cat"), (2, "dog"), (7, "cat")])
    ({1: 0, 2: 1, 7: 0}, ['cat', 'dog'])
    """
    names: dict[str, int] = {}
    return {number: names.setdefault(name or str(number), len(names)) for number, name in categories}, list(names)


def _boxes(
    images: Sequence[int], classes: Sequence[int], boxes: Sequence[Sequence[float]], crowd: Sequence[bool], areas: Sequence[Any]
) -> Boxes:
    """Objects with boxes xywh; an area that is None is that of its box."""
    xywh, given = np.array(boxes, np.float64).reshape(len(images), 4), np.array(areas, np.float64)  # None becomes NaN
    if not np.isfinite(xywh).all():
        raise ValueError("a box of no finite numbers")
    return Boxes(
        images=np.array(images, np.int64),
        classes=np.array(classes, np.int64),
        xyxy=boxes_to_xyxy(xywh, "xywh"),
        scores=np.ones(len(xywh)),
        areas=np.where(np.isnan(given), xywh[:, 2] * xywh[:, 3], given),
        crowd=np.array(crowd, bool),
    )


def _of_files(files: Sequence[_File], class_names: Sequence[str], *, are_shares: bool) -> Labels:
    """Label files, whose objects have the numbers or the names of their classes; without names the number is the name."""
    numbers = {name: number for number, name in enumerate(class_names)}
    found = [(n, one) for n, file in enumerate(files) for one in file.objects]
    classes = [numbers.get(one.named, one.named) for _, one in found]
    most = max(classes, default=0)
    class_names = class_names or [str(number) for number in range(most + 1)]
    if most >= len(class_names):
        raise RowsError(f"the labels have class {most}, and only {len(class_names)} names: {', '.join(class_names[:5])}")
    boxes, crowd = [one.xywh for _, one in found], [one.is_crowd for _, one in found]
    places, class_names = _merged(enumerate(class_names))
    return Labels(
        image_ids=range(len(files)),
        file_names=[file.image for file in files],
        sizes_wh=np.array([file.size_wh for file in files], np.int64),
        category_ids=places,
        class_names=class_names,
        objects=_boxes([n for n, _ in found], [places[number] for number in classes], boxes, crowd, [None] * len(found)),
        are_shares=are_shares,
        without_endings=True,
    )


def _folder(folder: Path) -> Labels:
    voc, yolo = (sorted(folder.rglob(f"*{suffix}")) for suffix in (".xml", ".txt"))
    if voc and yolo:
        raise RowsError(f"{folder} has .xml and .txt files: give a folder with the labels of one tool")
    if voc or yolo:
        return _voc(folder, voc) if voc else _yolo_folder(folder, yolo)
    expected = "expected COCO annotations (.json), a folder of YOLO or Pascal VOC labels, or a data.yaml"
    raise RowsError(f"ground truth {folder} holds no labels: {expected}")


def _yolo_dataset(path: Path) -> Labels:
    """The labels that a `data.yaml` of Ultralytics names: its `val` images, else `test`, else `train`.

    An image without a label file has no objects. https://docs.ultralytics.com/datasets/detect/
    """
    try:
        content = yaml.safe_load(path.read_bytes())
        split = next(content[key] for key in ("val", "test", "train") if content.get(key))
        names = _names_of(content)
        root = path.parent / str(content.get("path") or "")
    except OSError as err:
        raise RowsError(f"{path} cannot be read: {err.strerror or err}") from err
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError, StopIteration) as err:
        expected = "expected the keys val (or test, train) and names, by number from 0 without gaps"
        raise RowsError(f"{path}: {expected}, got {type(err).__name__}: {err}") from err
    # a path that is relative to somebody's working folder is looked for beside the file, too
    root = root if root.is_dir() else path.parent
    images = [image for one in ([split] if isinstance(split, str) else split) for image in _listed_images(root, str(one))]
    if not images:
        raise RowsError(f"{path}: no image in {split}, which was looked for in {root}")
    files = [_yolo_file(_label_of(image), _without_ending(image, root)) for image in shown(images, "labels", "files")]
    if not any(_label_of(image).is_file() for image in images):
        raise RowsError(f"{path}: none of {len(images)} images has a label file such as {_label_of(images[0])}")
    return _of_files(files, names, are_shares=True)


def _names_of(dataset: Mapping[str, Any]) -> list[str]:
    """The class names of a `data.yaml`, by number from 0."""
    named = dataset["names"]
    numbered = {int(number): str(name) for number, name in (named.items() if isinstance(named, dict) else enumerate(named))}
    return [numbered[number] for number in range(len(numbered))]


def _names_beside(folder: Path) -> Sequence[str]:
    """The class names in the folder of labels or above it: in a file of names, or in the `data.yaml` of their data set."""
    named = next((path for place in (folder, folder.parent) for name in _NAME_FILES if (path := place / name).is_file()), None)
    datasets = [place / "data.yaml" for place in (folder.parent, folder.parent.parent)]
    named = named or next((path for path in datasets if path.is_file()), None)
    if not named:
        return ()
    try:
        return _names_of(yaml.safe_load(named.read_bytes())) if named.suffix == ".yaml" else read_class_names(named)
    except (OSError, ValueError) as err:
        raise RowsError(f"{named}: expected one class name a line: {err}") from err
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as err:
        raise RowsError(
            f"{named}: expected the key names, by number from 0 without gaps, got {type(err).__name__}: {err}"
        ) from err


def _yolo_folder(folder: Path, files: Sequence[Path]) -> Labels:
    """YOLO labels, with names as `_names_beside` finds them.

    An image in the same folder, or in `images/` beside `labels/`, that has no label file has no objects.
    """
    top = folder / "labels" if (folder / "labels").is_dir() else folder
    labels = {_without_ending(path, top): path for path in files if path.is_relative_to(top) and path.name not in _NAME_FILES}
    if not labels:
        raise RowsError(f"{folder} has no label file beside {', '.join(path.name for path in files[:3])}")
    images = top.with_name("images") if top.name == "labels" and top.with_name("images").is_dir() else top
    found = {_without_ending(image, images): image.with_suffix(".txt") for image in _images_in(images)} | labels
    read = [_yolo_file(path, image) for image, path in shown(sorted(found.items()), "labels", "files")]
    return _of_files(read, _names_beside(folder), are_shares=True)


def _yolo_file(path: Path, image: str) -> _File:
    """The labels in a file; none if it does not exist."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return _File(image, [_yolo_object(line.split()) for line in lines if line.strip()])
    except (ValueError, OverflowError) as err:
        expected = "expected `class cx cy width height`, the last four as shares of the image in 0..1"
        raise RowsError(f"{path}: {expected}, got {err}") from err


def _yolo_object(fields: list[str]) -> _Object:
    """One line: a box, or the corners of a polygon, whose box counts."""
    number, values = float(fields[0]), [float(field) for field in fields[1:]]
    if number < 0 or number != int(number) or len(values) < 4 or len(values) % 2:
        raise ValueError(" ".join(fields[:6]))
    if not all(-0.01 <= value <= 1.01 for value in values):  # NaN fails, too
        raise ValueError(f"{' '.join(fields[:6])}, which are pixels or no numbers")
    if len(values) == 4:
        cx, cy, w, h = values
        return _Object(int(number), (cx - w / 2, cy - h / 2, w, h))
    xs, ys = values[::2], values[1::2]
    return _Object(int(number), (min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)))


def _listed_images(root: Path, split: str) -> Iterable[Path]:
    """The images of a folder, or those that a `.txt` file lists."""
    place = root / split
    if place.suffix == ".txt" and place.is_file():
        return [root / line.strip() for line in place.read_text(encoding="utf-8").splitlines() if line.strip()]
    return _images_in(place)


def _images_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in _IMAGE_ENDINGS]


def _label_of(image: Path) -> Path:
    """Ultralytics' rule: the last `images` of the path becomes `labels`."""
    parts = list(Path(f"{without_ending(image.as_posix())}.txt").parts)
    if "images" in parts[:-1]:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return Path(*parts)


def _without_ending(path: Path, top: Path) -> str:
    return without_ending((path.relative_to(top) if path.is_relative_to(top) else path).as_posix())


def _voc(folder: Path, paths: Sequence[Path]) -> Labels:
    files = [_voc_file(path, folder) for path in shown(paths, "labels", "files")]
    names = sorted({one.named for file in files for one in file.objects})
    if not names:
        raise RowsError(f"{folder}: {len(files)} .xml files and no object: expected Pascal VOC annotations")
    return _of_files(files, names, are_shares=False)


def _voc_file(path: Path, folder: Path) -> _File:
    """A Pascal VOC annotation; the image is named by the XML file.

    Corners count pixels from 1, and the last pixel is inside: 1, 1, 10, 10 is the box 0, 0, 10, 10. An object marked as
    difficult counts neither as found nor as missed. http://host.robots.ox.ac.uk/pascal/VOC/voc2012/devkit_doc.pdf
    """
    from xml.etree.ElementTree import ParseError

    try:
        from defusedxml import DefusedXmlException
        from defusedxml.ElementTree import parse
    except ImportError as err:
        raise RowsError(f"Pascal VOC is read by defusedxml: {pip_install('voc')}") from err
    try:
        root, objects = parse(path).getroot(), []
        width, height = (int(float(root.findtext(f"size/{side}") or 0)) for side in ("width", "height"))
        for one in root.iter("object"):
            x0, y0, x1, y1 = (float(one.findtext(f"bndbox/{edge}") or "nan") for edge in ("xmin", "ymin", "xmax", "ymax"))
            if not np.isfinite((x0, y0, x1, y1)).all():
                raise ValueError("an object without xmin, ymin, xmax, ymax")
            is_difficult = (one.findtext("difficult") or "0").strip() == "1"
            box_xywh = (x0 - 1, y0 - 1, x1 - x0 + 1, y1 - y0 + 1)
            objects.append(_Object(str(one.findtext("name")).strip(), box_xywh, is_difficult))
        return _File(_without_ending(path, folder), objects, (width, height))
    except (OSError, ValueError, ParseError, DefusedXmlException) as err:
        raise RowsError(f"{path}: expected a Pascal VOC annotation, got {type(err).__name__}: {err}") from err
