"""Rows as labels, which annotation tools and trainers import: YOLO and Pascal VOC as a zip archive, CVAT as one XML file.

Labels have no confidence. Their boxes are clipped to the image, and those outside of it are left out. In an archive, each image
has a file with its name below the root: `gs://bucket/photos/a/1.jpg` becomes `labels/a/1.txt` if the root is `gs://bucket/photos`.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterable
from typing import Any, BinaryIO
from xml.etree import ElementTree

import yaml

from models.base.image_uris import without_ending
from pipeline.exports.data_set import WHOLE_NAMES, Box, DataSet, clip
from pipeline.log_lines import plural
from pipeline.records import identity_hash

_HEAD = """\
# path is the folder of this file: run there, or write its absolute path. Put the photos, or a link to them, into images/ beside
# labels/. All images are in both splits.
"""
_SPLITS = {"path": ".", "train": "images.txt", "val": "images.txt"}
_MOST_NAME_BYTES = 200
_MOST_CLASSES = 10_000  # named in a file; anyone who can write rows can write a class id of any size
_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # https://www.w3.org/TR/xml/#charsets


def write_yolo(rows: Iterable[dict[str, Any]], file: BinaryIO, data_set: DataSet = WHOLE_NAMES) -> list[str]:
    """Writes JSON rows as `labels/<image>.txt`, and what a training needs beside the photos in `images/`.

    `images.txt` lists the images, `data.yaml` names them and all classes, and `classes.txt` has the names alone.

    Source of the format: https://docs.ultralytics.com/datasets/detect/

    Returns:
      A line about the images that are not listed, if there are any: a trainer would take the labels of another row for theirs.
    """
    names, not_listed, such = dict(data_set.class_names), 0, ""
    with zipfile.ZipFile(file, "w") as archive, tempfile.TemporaryFile() as images:
        for row in rows:
            names.update((found["class_id"], found["class_name"]) for found in row["detections"])
            lines = (_yolo_line(found, box, row["image"]) for found, box in clipped(row))
            name = _path_of(data_set.name_of(row["image"]["uri"]))
            _add(archive, label := _free_name(archive, "labels/{}.txt", name), "".join(lines))
            if label == f"labels/{without_ending(name)}.txt":
                images.write(f"./images/{name}".encode().replace(b"\n", b"?") + b"\n")
            else:
                not_listed, such = not_listed + 1, name
        images.seek(0)
        with archive.open(zipfile.ZipInfo("images.txt"), "w", force_zip64=True) as listed:
            shutil.copyfileobj(images, listed)
        every = [names.get(number, f"class_{number}") for number in range(min(max(names, default=-1) + 1, _MOST_CLASSES))]
        _add(archive, "data.yaml", _HEAD + yaml.safe_dump({**_SPLITS, "names": every}, allow_unicode=True, sort_keys=False))
        _add(archive, "classes.txt", "".join(f"{each}\n" for each in every))
    why = "another row has its labels' name; choose one model, or rename images that differ in their endings"
    return [f"yolo.zip does not list {plural(not_listed, 'image')} in images.txt, such as {such}: {why}"] if not_listed else []


def write_voc(rows: Iterable[dict[str, Any]], file: BinaryIO, data_set: DataSet = WHOLE_NAMES) -> None:
    """Writes JSON rows as `Annotations/<image>.xml`; pixels are whole and count from 1, and the last one is in the box.

    Source of the format: http://host.robots.ox.ac.uk/pascal/VOC/voc2012/devkit_doc.pdf
    """
    with zipfile.ZipFile(file, "w") as archive:
        for row in rows:
            annotation = ElementTree.tostring(_voc_annotation(row), encoding="unicode")
            _add(archive, _free_name(archive, "Annotations/{}.xml", _path_of(data_set.name_of(row["image"]["uri"]))), annotation)


def write_cvat(rows: Iterable[dict[str, Any]], file: BinaryIO) -> None:
    """Writes JSON rows as "CVAT for images 1.1", after the labels that occur in them; one image is in memory at a time.

    CVAT finds the image of a task by `name`: the path of a local file, or an object's name in its bucket. The labels of the task
    must have the names of the classes.

    Source of the format: https://docs.cvat.ai/docs/manual/advanced/xml_format/
    """
    names: dict[str, None] = {}
    with tempfile.TemporaryFile() as images:
        for number, row in enumerate(rows):
            names.update((found["class_name"], None) for found in row["detections"])
            images.write(_cvat_bytes(_cvat_image(number, row)))
        labels = (_element("label", *_texts({"name": name})) for name in names)
        meta = _element("meta", _element("task", _element("labels", *labels)))
        file.write(b"<annotations><version>1.1</version>\n" + _cvat_bytes(meta))
        images.seek(0)
        shutil.copyfileobj(images, file)
        file.write(b"</annotations>\n")


def clipped(row: dict[str, Any]) -> Iterable[tuple[dict[str, Any], Box]]:
    """Each detection with its box, clipped to the image."""
    for found in row["detections"]:
        if box := clip(found["box_xyxy"], row["image"]):
            yield found, box


def short_name(name: str) -> str:
    """A name that a disk takes, also with an ending: most allow 255 bytes, Cloud Storage 1,024."""
    name_bytes = name.encode()
    if len(name_bytes) <= _MOST_NAME_BYTES:
        return name
    return f"{name_bytes[:_MOST_NAME_BYTES].decode(errors='ignore')}~{identity_hash(name):016x}"


def _add(archive: zipfile.ZipFile, name: str, text: str) -> None:
    """Adds a file without a time, so that equal rows give equal archives."""
    archive.writestr(zipfile.ZipInfo(name), text.encode("utf-8", "backslashreplace"), zipfile.ZIP_DEFLATED)


def _free_name(archive: zipfile.ZipFile, pattern: str, name: str) -> str:
    """A name for an image's label that no other label has: 1.jpg and 1.png may lie in one folder, and an image come twice."""
    stem = without_ending(name)
    kind = name.removeprefix(stem)
    while pattern.format(stem) in archive.NameToInfo:
        stem, kind = f"{stem}{kind or '_'}", ""
    return pattern.format(stem)


def _path_of(uri: str) -> str:
    """A relative path that leads to no folder above, wherever the archive is unpacked.

    >>> _path_of("gs://bucket/a/1.jpg"), _path_of("../photos/./1.jpg"), _path_of("/home/1.jpg")
    ('bucket/a/1.jpg', 'photos/1.jpg', 'home/1.jpg')
    """
    path = uri.encode("utf-8", "backslashreplace").decode().rpartition("://")[2].replace("\\", "_")
    return "/".join(short_name(part) for part in path.split("/") if part not in ("", ".", ".."))


def _yolo_line(found: dict[str, Any], box_xyxy: Box, image: dict[str, Any]) -> str:
    (x0, y0, x1, y1), w, h = box_xyxy, image["width"], image["height"]
    cx, cy = (x0 + x1) / 2 / w, (y0 + y1) / 2 / h
    return f"{found['class_id']} {cx:.6f} {cy:.6f} {(x1 - x0) / w:.6f} {(y1 - y0) / h:.6f}\n"


def _voc_annotation(row: dict[str, Any]) -> ElementTree.Element:
    uri, w, h = row["image"]["uri"], row["image"]["width"], row["image"]["height"]
    objects = []
    for found, (x0, y0, x1, y1) in clipped(row):
        xmin, ymin = min(round(x0) + 1, w), min(round(y0) + 1, h)
        box = {"xmin": xmin, "ymin": ymin, "xmax": max(round(x1), xmin), "ymax": max(round(y1), ymin)}
        objects.append(_element("object", *_texts({"name": found["class_name"]}), _element("bndbox", *_texts(box))))
    size = _element("size", *_texts({"width": w, "height": h, "depth": 3}))
    return _element("annotation", *_texts({"filename": posixpath.basename(uri)}), size, *objects)


def _cvat_image(number: int, row: dict[str, Any]) -> ElementTree.Element:
    image, boxes = row["image"], []
    for found, box in clipped(row):
        corners = {name: f"{value:.2f}" for name, value in zip(("xtl", "ytl", "xbr", "ybr"), box, strict=True)}
        boxes.append(_element("box", label=found["class_name"], source="auto", occluded=0, z_order=0, **corners))
    return _element("image", *boxes, id=number, name=_cvat_name(image["uri"]), width=image["width"], height=image["height"])


def _cvat_name(uri: str) -> str:
    """The name of an image in a task of CVAT.

    >>> _cvat_name("gs://bucket/a/1.jpg"), _cvat_name("photos/1.jpg")
    ('a/1.jpg', 'photos/1.jpg')
    """
    scheme, _, path = uri.rpartition("://")
    return path.partition("/")[2] if scheme else path


def _cvat_bytes(element: ElementTree.Element) -> bytes:
    text = ElementTree.tostring(element, encoding="unicode")
    return text.replace("\r", "&#13;").encode() + b"\n"  # a reader takes a plain one for an end of line


def _texts(texts: dict[str, Any]) -> list[ElementTree.Element]:
    """Elements with these names and texts."""
    return [_element(name, text=text) for name, text in texts.items()]


def _element(tag: str, /, *children: ElementTree.Element, text: object = "", **attributes: object) -> ElementTree.Element:
    """An element, with `?` for what XML cannot hold, such as most control characters; ElementTree escapes the rest."""
    element = ElementTree.Element(tag, {name: _NOT_IN_XML.sub("?", str(value)) for name, value in attributes.items()})
    element.text = _NOT_IN_XML.sub("?", str(text))
    element.extend(children)
    return element
