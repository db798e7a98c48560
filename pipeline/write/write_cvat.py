"""Rows as CVAT's XML ("CVAT for images 1.1"): boxes that annotators accept or correct.

CVAT finds the image of a task by `name`: the path of a local file, or an object's name in its bucket. The labels of the task must
have the names of the classes. The format has no confidence.

Source of the format: https://docs.cvat.ai/docs/manual/advanced/xml_format/
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from typing import Any, BinaryIO
from xml.etree import ElementTree

from pipeline.write.write_labels import add_element, clipped, xml_text


def write_cvat(rows: Iterable[dict[str, Any]], file: BinaryIO) -> None:
    """Writes JSON rows as images, after the labels that occur in them; one image is in memory at a time."""
    names: dict[str, None] = {}
    with tempfile.TemporaryFile() as images:
        for number, row in enumerate(rows):
            names.update((found["class_name"], None) for found in row["detections"])
            images.write(_bytes(_image(number, row)))
        meta = ElementTree.Element("meta")
        labels = add_element(add_element(meta, "task"), "labels")
        for name in names:
            add_element(add_element(labels, "label"), "name", name)
        file.write(b"<annotations><version>1.1</version>\n" + _bytes(meta))
        images.seek(0)
        shutil.copyfileobj(images, file)
        file.write(b"</annotations>\n")


def _bytes(element: ElementTree.Element) -> bytes:
    text = ElementTree.tostring(element, encoding="unicode")
    return text.replace("\r", "&#13;").encode() + b"\n"  # a reader takes a plain one for an end of line


def _image(number: int, row: dict[str, Any]) -> ElementTree.Element:
    image = row["image"]
    sizes = {"width": str(image["width"]), "height": str(image["height"])}
    element = ElementTree.Element("image", {"id": str(number), "name": _name(image["uri"]), **sizes})
    for found, corners in clipped(row):
        places = {name: f"{value:.2f}" for name, value in zip(("xtl", "ytl", "xbr", "ybr"), corners, strict=True)}
        label = {"label": xml_text(found["class_name"]), "source": "auto", "occluded": "0", "z_order": "0"}
        ElementTree.SubElement(element, "box", label | places)
    return element


def _name(uri: str) -> str:
    """The name of an image in a task of CVAT.

    >>> _name("gs://bucket/a/1.jpg"), _name("photos/1.jpg")
    ('a/1.jpg', 'photos/1.jpg')
    """
    scheme, _, path = uri.rpartition("://")
    return xml_text(path.partition("/")[2] if scheme else path)
