"""Paths in settings: plain, with `~`, or as a `file:///…` URI."""

from __future__ import annotations

import os
from urllib.parse import unquote

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
