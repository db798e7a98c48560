"""Rows of one model: what a file that has one place for an image, and one name for a class, can hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pipeline.errors import InputError


def of_one_model(rows: Iterable[dict[str, Any]], format_name: str, *, by_number: bool) -> Iterator[dict[str, Any]]:
    """JSON rows of detections, of which each image has one.

    Args:
      rows: The rows.
      format_name: Names the format in errors.
      by_number: Whether the format tells classes apart by their numbers.

    Raises:
      InputError: They are of several models, or a class has two names; the message says which flag decides.
    """
    model, names = "", dict[int, tuple[str, str]]()  # the name of each class, and the version that gave it
    for row in rows:
        name, version = row["model"]["name"], row["model"]["version"]
        if (model := model or name) != name:
            raise InputError(
                f"{format_name} holds one row an image, and there are rows of {model} and of {name}; --model decides"
            )
        for found in row["detections"] if by_number else ():
            known, of_version = names.setdefault(found["class_id"], (found["class_name"], version))
            if known != found["class_name"]:
                versions = f"version {of_version} and {found['class_name']!r} in version {version}; --model-version decides"
                others = f"some rows and {found['class_name']!r} in others of version {version}; --settings decides"
                which = versions if of_version != version else others
                raise InputError(f"{format_name} has one name a class, and class {found['class_id']} is {known!r} in {which}")
        yield row
