"""Reads a file of class names: the line of a name is the number of its class."""

from __future__ import annotations

import os


def read_class_names(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The class names in a text file, one a line; only blank lines at its end are left out.

    Raises:
      OSError: The file cannot be read.
      ValueError: It is no text, or a line before the last name is empty, which would give all that follow another number.
    """
    with open(path, encoding="utf-8-sig") as file:
        names = tuple(line.strip() for line in file.read().rstrip().split("\n"))
    if "" in names[:-1]:
        raise ValueError(f"line {names.index('') + 1} is empty, expected a class name")
    return tuple(filter(None, names))
