"""Reads label files that have one file for each image: YOLO's `.txt` and Pascal VOC's `.xml`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from models.class_names import read_class_names
from models.evaluate.detection_rows import RowsError
from models.progress import shown

_IMAGE_ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".heic", ".avif", ".jp2"}
_NAME_FILES = ("classes.txt", "obj.names", "classes.names")
_YOLO_LINE = "expected `class cx cy width height`, the last four as shares of the image in 0..1"


@dataclasses.dataclass(frozen=True, slots=True)
class Labels:
    """The labels of one image.

    Attributes:
      image: Path of the image without its ending, from the folder of the labels.
      width: Pixels; 0 if unknown.
      height: Pixels; 0 if unknown.
      objects: (index of the class, box `xywh`, whether it does not count).
    """

    image: str
    width: int
    height: int
    objects: list[tuple[int, list[float], bool]]


def read_yolo_dataset(path: Path) -> tuple[list[Labels], list[str], bool]:
    """Reads the labels that a `data.yaml` of Ultralytics names: its `val` images, else `test`, else `train`.

    An image without a label file has no objects. https://docs.ultralytics.com/datasets/detect/
    """
    try:
        content = yaml.safe_load(path.read_bytes())
        split = next(content[key] for key in ("val", "test", "train") if content.get(key))
        named = content["names"]
        numbered = {int(number): str(name) for number, name in (named.items() if isinstance(named, dict) else enumerate(named))}
        names = [numbered[number] for number in range(len(numbered))]
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
    labels = [_yolo_labels(_label_of(image), _without_ending(image, root)) for image in shown(images, "labels", "files")]
    if not any(_label_of(image).is_file() for image in images):
        raise RowsError(f"{path}: none of {len(images)} images has a label file such as {_label_of(images[0])}")
    return labels, names, True


def read_yolo_folder(folder: Path, files: Sequence[Path]) -> tuple[list[Labels], list[str], bool]:
    """Reads a folder of YOLO labels.

    Names of classes come from `classes.txt` or `obj.names` in the folder or above it. An image in the same folder, or in
    `images/` beside `labels/`, that has no label file has no objects.
    """
    names = _class_names(folder)
    top = folder / "labels" if (folder / "labels").is_dir() else folder
    labels = {path.relative_to(top).with_suffix("").as_posix(): path for path in files if path.is_relative_to(top)}
    labels = {image: path for image, path in labels.items() if path.name not in _NAME_FILES}
    images = top.with_name("images") if top.name == "labels" and top.with_name("images").is_dir() else top
    bare = {_without_ending(image, images): image.with_suffix(".txt") for image in _images_in(images)}
    found = {**bare, **labels}
    if not labels:
        raise RowsError(f"{folder} has no label file beside {', '.join(path.name for path in files[:3])}")
    return [_yolo_labels(path, image) for image, path in shown(sorted(found.items()), "labels", "files")], names, True


def read_voc(folder: Path, files: Sequence[Path]) -> tuple[list[Labels], list[str], bool]:
    """Reads Pascal VOC annotations; an image is named by its XML file.

    Corners count pixels from 1, and the last pixel is inside: 1, 1, 10, 10 is the box 0, 0, 10, 10. An object marked as
    difficult counts neither as found nor as missed. http://host.robots.ox.ac.uk/pascal/VOC/voc2012/devkit_doc.pdf
    """
    read = [(path, *_voc_objects(path)) for path in shown(files, "labels", "files")]
    names = sorted({name for _, _, objects in read for name, _, _ in objects})
    labels = [
        Labels(_without_ending(path, folder), *size_wh, [(names.index(name), box, hard) for name, box, hard in objects])
        for path, size_wh, objects in read
    ]
    if not names:
        raise RowsError(f"{folder}: {len(files)} .xml files and no object: expected Pascal VOC annotations")
    return labels, names, False


def _voc_objects(path: Path) -> tuple[tuple[int, int], list[tuple[str, list[float], bool]]]:
    from xml.etree.ElementTree import ParseError

    try:
        from defusedxml import DefusedXmlException
        from defusedxml.ElementTree import parse
    except ImportError as err:
        raise RowsError("Pascal VOC is read by defusedxml: pip install 'hybrid-detection-pipeline[voc]'") from err
    try:
        root = parse(path).getroot()
        size_wh = tuple(int(float(root.findtext(f"size/{side}") or 0)) for side in ("width", "height"))
        objects = []
        for one in root.iter("object"):
            x0, y0, x1, y1 = (float(one.findtext(f"bndbox/{edge}") or "nan") for edge in ("xmin", "ymin", "xmax", "ymax"))
            if not all(map(math.isfinite, (x0, y0, x1, y1))):
                raise ValueError("an object without xmin, ymin, xmax, ymax")
            hard = (one.findtext("difficult") or "0").strip() == "1"
            objects.append((str(one.findtext("name")).strip(), [x0 - 1, y0 - 1, x1 - x0 + 1, y1 - y0 + 1], hard))
    except (OSError, ValueError, ParseError, DefusedXmlException) as err:
        raise RowsError(f"{path}: expected a Pascal VOC annotation, got {type(err).__name__}: {err}") from err
    return (size_wh[0], size_wh[1]), objects


def _yolo_labels(path: Path, image: str) -> Labels:
    """The labels in a file; none if it does not exist."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return Labels(image, 0, 0, [_yolo_object(line.split()) for line in lines if line.strip()])
    except (ValueError, OverflowError) as err:
        raise RowsError(f"{path}: {_YOLO_LINE}, got {err}") from err


def _yolo_object(fields: list[str]) -> tuple[int, list[float], bool]:
    """One line: a box, or the corners of a polygon, whose box counts."""
    number, values = float(fields[0]), [float(field) for field in fields[1:]]
    if number < 0 or number != int(number) or len(values) < 4 or len(values) % 2:
        raise ValueError(" ".join(fields[:6]))
    if not all(-0.01 <= value <= 1.01 for value in values):  # NaN fails, too
        raise ValueError(f"{' '.join(fields[:6])}, which are pixels or no numbers")
    if len(values) == 4:
        cx, cy, w, h = values
        return int(number), [cx - w / 2, cy - h / 2, w, h], False
    xs, ys = values[::2], values[1::2]
    return int(number), [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)], False


def _class_names(folder: Path) -> list[str]:
    """Names by class id, from a file of names in the folder or above it; empty without one."""
    places = [place / name for place in (folder, folder.parent) for name in _NAME_FILES]
    path = next((path for path in places if path.is_file()), None)
    try:
        return [] if path is None else list(read_class_names(path))
    except (OSError, ValueError) as err:
        raise RowsError(f"{path}: expected one class name a line: {err}") from err


def _listed_images(root: Path, split: str) -> Iterator[Path]:
    """The images of a folder, or those that a `.txt` file lists."""
    place = root / split
    if place.suffix == ".txt" and place.is_file():
        lines = place.read_text(encoding="utf-8").splitlines()
        return (root / line.strip() for line in lines if line.strip())
    return _images_in(place)


def _images_in(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.suffix.lower() in _IMAGE_ENDINGS)


def _label_of(image: Path) -> Path:
    """Ultralytics' rule: the last `images` of the path becomes `labels`."""
    parts = list(image.with_suffix(".txt").parts)
    if "images" in parts[:-1]:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return Path(*parts)


def _without_ending(path: Path, top: Path) -> str:
    return (path.relative_to(top) if path.is_relative_to(top) else path).with_suffix("").as_posix()
