"""Names of images relative to the root of a data set, and the classes of its models."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Box = tuple[float, float, float, float]
"""xyxy, in pixels."""


class DataSet(NamedTuple):
    """What the rows of an export have in common.

    Attributes:
      root: The folder from which the names of images count; empty: none, and their URIs are their names.
      class_names: The names of all classes, by number, also of those that no row has.
      has_images: Whether any image lies below the root.
    """

    root: str = ""
    class_names: dict[int, str] = {}  # noqa: RUF012  nobody changes it
    has_images: bool = True

    def name_of(self, uri: str) -> str:
        """The name of an image in the data set: its path below the root, or its whole URI if it lies elsewhere.

        >>> data_set = DataSet("gs://bucket/photos")
        >>> data_set.name_of("gs://bucket/photos/a/1.jpg"), data_set.name_of("gs://bucket/2.jpg")
        ('a/1.jpg', 'gs://bucket/2.jpg')
        """
        return uri[len(self.root) :].lstrip("/") if self.root and uri.startswith(f"{self.root.rstrip('/')}/") else uri


WHOLE_NAMES = DataSet()


def data_set_of(rows: Iterable[dict[str, Any]], root: str = "") -> tuple[DataSet, set[tuple[str, str]]]:
    """The data set of rows, with the class names that they have, and the models that made them by name and version.

    Args:
      rows: JSON rows.
      root: The root; empty: the deepest folder that all images have in common.
    """
    data_set, common, has_images = DataSet(root), None, False
    names: dict[int, str] = {}
    models: set[tuple[str, str]] = set()
    for row in rows:
        models.add((row["model"]["name"], row["model"]["version"]))
        names.update((found["class_id"], found["class_name"]) for found in row["detections"])
        uri = row["image"]["uri"]
        if root:
            has_images |= data_set.name_of(uri) != uri
        else:
            parts = posixpath.dirname(uri).split("/")
            common = parts if common is None else common[: _equal(common, parts)]
    return DataSet(root or "/".join(common or ()), names, has_images or not root), models


def _equal(some: list[str], others: list[str]) -> int:
    """How many parts at the beginning are equal."""
    pairs = zip(some, others, strict=False)
    return next((number for number, (one, other) in enumerate(pairs) if one != other), min(len(some), len(others)))


def clip(box_xyxy: Sequence[float], image: Mapping[str, Any]) -> Box | None:
    """A box, clipped to the image of its row; None if it lies outside."""
    x0, y0, x1, y1 = box_xyxy
    x0, y0, x1, y1 = max(x0, 0.0), max(y0, 0.0), min(x1, image["width"]), min(y1, image["height"])
    return (x0, y0, x1, y1) if x0 < x1 and y0 < y1 else None
