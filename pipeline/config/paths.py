"""Paths in settings: plain, with `~`, or as a `file:///…` URI."""

from __future__ import annotations

import os
from typing import Annotated
from urllib.parse import unquote

from pydantic import AfterValidator, Strict, WithJsonSchema
from pydantic_core import PydanticCustomError

_FILE = "file://"


def local_path(text: str) -> str:
    """The plain path of a text; other URIs, such as `gs://…`, stay as they are.

    >>> local_path("file:///data/a%20b.jpg"), local_path("gs://bucket/~"), local_path("out/")
    ('/data/a b.jpg', 'gs://bucket/~', 'out/')

    Raises:
      ValueError: It is a `file:` URI of another machine.
    """
    if text.startswith("~"):
        return os.path.expanduser(text)
    if not text.lower().startswith(_FILE):
        return text
    path = text[len(_FILE) :].removeprefix("localhost")
    if not path.startswith("/"):
        raise ValueError(f"expected file:/// and an absolute path, got {text!r}")
    return path if "{date" in path else unquote(path)  # strftime's directives look like escapes


def _checked(text: str) -> str:
    try:
        return local_path(text)
    except ValueError as err:
        raise PydanticCustomError("path", "file:/// and an absolute path") from err


def _checked_some(text: str) -> str:
    if not text:
        raise PydanticCustomError("path", "a path")
    return _checked(text)


Path = Annotated[str, Strict(), AfterValidator(_checked)]
SomePath = Annotated[str, Strict(), AfterValidator(_checked_some), WithJsonSchema({"type": "string", "minLength": 1})]
