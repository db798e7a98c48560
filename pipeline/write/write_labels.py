"""Rows as labels, which annotation tools and trainers import: a zip archive with a file for each image, of YOLO or Pascal VOC.

Labels have no confidence. Their boxes are clipped to the image, and those outside of it are left out. A label is named after its
image: `gs://bucket/a/1.jpg` becomes `labels/bucket/a/1.txt`.
"""

from __future__ import annotations

import posixpath
import re
import zipfile
from collections.abc import Iterable
from typing import Any, BinaryIO
from xml.etree import ElementTree

import yaml

from models.image_uris import video_frame
from pipeline.records import identity_hash

_MOST_NAME_BYTES = 200
_MOST_CLASSES = 10_000  # named in a file; anyone who can write rows can write a class id of any size
Box = tuple[float, float, float, float]
_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # https://www.w3.org/TR/xml/#charsets


def write_yolo(rows: Iterable[dict[str, Any]], file: BinaryIO) -> None:
    """Writes JSON rows as `labels/<image>.txt`, and `data.yaml` and `classes.txt` with the names of the classes that occur.

    Source of the format: https://docs.ultralytics.com/datasets/detect/
    """
    names: dict[int, str] = {}
    with zipfile.ZipFile(file, "w") as archive:
        for row in rows:
            names.update((found["class_id"], found["class_name"]) for found in row["detections"])
            lines = (_yolo_line(found, box, row["image"]) for found, box in clipped(row))
            _add(archive, _free_name(archive, "labels/{}.txt", row["image"]["uri"]), "".join(lines))
        every = [names.get(number, f"class_{number}") for number in range(min(max(names, default=-1) + 1, _MOST_CLASSES))]
        _add(archive, "data.yaml", yaml.safe_dump({"names": every}, allow_unicode=True))
        _add(archive, "classes.txt", "".join(f"{each}\n" for each in every))


def write_voc(rows: Iterable[dict[str, Any]], file: BinaryIO) -> None:
    """Writes JSON rows as `Annotations/<image>.xml`; pixels are whole and count from 1, and the last one is in the box.

    Source of the format: http://host.robots.ox.ac.uk/pascal/VOC/voc2012/devkit_doc.pdf
    """
    with zipfile.ZipFile(file, "w") as archive:
        for row in rows:
            _add(archive, _free_name(archive, "Annotations/{}.xml", row["image"]["uri"]), _voc_annotation(row))


def _add(archive: zipfile.ZipFile, name: str, text: str) -> None:
    """Adds a file without a time, so that equal rows give equal archives."""
    archive.writestr(zipfile.ZipInfo(name), text.encode("utf-8", "backslashreplace"), zipfile.ZIP_DEFLATED)


def _free_name(archive: zipfile.ZipFile, place: str, uri: str) -> str:
    """A name for an image's label that no other label has: 1.jpg and 1.png may lie in one folder, and an image come twice."""
    of_image = _path_of(uri)
    _, time_ms = video_frame(of_image) or ("", None)
    stem, kind = posixpath.splitext(of_image) if time_ms is None else (of_image, "")  # 12.480 has no ending
    while place.format(stem) in archive.NameToInfo:
        stem, kind = f"{stem}{kind or '_'}", ""
    return place.format(stem)


def _path_of(uri: str) -> str:
    """A relative path that leads to no folder above, wherever the archive is unpacked.

    >>> _path_of("gs://bucket/a/1.jpg"), _path_of("../photos/./1.jpg"), _path_of("/home/1.jpg")
    ('bucket/a/1.jpg', 'photos/1.jpg', 'home/1.jpg')
    """
    path = uri.encode("utf-8", "backslashreplace").decode().rpartition("://")[2].replace("\\", "_")
    return "/".join(short_name(part) for part in path.split("/") if part not in ("", ".", ".."))


def short_name(name: str) -> str:
    """A name that a disk takes, also with an ending: most allow 255 bytes, Cloud Storage 1,024."""
    name_bytes = name.encode()
    if len(name_bytes) <= _MOST_NAME_BYTES:
        return name
    return f"{name_bytes[:_MOST_NAME_BYTES].decode(errors='ignore')}~{identity_hash(name):016x}"


def clipped(row: dict[str, Any]) -> Iterable[tuple[dict[str, Any], Box]]:
    """Each detection with its box, clipped to the image."""
    w, h = row["image"]["width"], row["image"]["height"]
    for found in row["detections"]:
        x0, y0, x1, y1 = found["box_xyxy"]
        x0, y0, x1, y1 = max(x0, 0.0), max(y0, 0.0), min(x1, w), min(y1, h)
        if x0 < x1 and y0 < y1:
            yield found, (x0, y0, x1, y1)


def _yolo_line(found: dict[str, Any], box_xyxy: Box, image: dict[str, Any]) -> str:
    (x0, y0, x1, y1), w, h = box_xyxy, image["width"], image["height"]
    cx, cy = (x0 + x1) / 2 / w, (y0 + y1) / 2 / h
    return f"{found['class_id']} {cx:.6f} {cy:.6f} {(x1 - x0) / w:.6f} {(y1 - y0) / h:.6f}\n"


def _voc_annotation(row: dict[str, Any]) -> str:
    image = row["image"]
    annotation = ElementTree.Element("annotation")
    add_element(annotation, "filename", posixpath.basename(image["uri"]))
    size = add_element(annotation, "size")
    for name, value in (("width", image["width"]), ("height", image["height"]), ("depth", 3)):
        add_element(size, name, value)
    for found, (x0, y0, x1, y1) in clipped(row):
        one = add_element(annotation, "object")
        add_element(one, "name", found["class_name"])
        box, xmin, ymin = add_element(one, "bndbox"), min(round(x0) + 1, image["width"]), min(round(y0) + 1, image["height"])
        corners = {"xmin": xmin, "ymin": ymin, "xmax": max(round(x1), xmin), "ymax": max(round(y1), ymin)}
        for name, value in corners.items():
            add_element(box, name, value)
    return ElementTree.tostring(annotation, encoding="unicode")


def add_element(parent: ElementTree.Element, name: str, text: object = "") -> ElementTree.Element:
    """A new element in another one, with a text."""
    element = ElementTree.SubElement(parent, name)
    element.text = xml_text(str(text))
    return element


def xml_text(text: str) -> str:
    """A text with `?` for what XML cannot hold, such as most control characters; ElementTree escapes the rest."""
    return _NOT_IN_XML.sub("?", text)
