"""Recognises images by their names or first bytes, and names the kind of other files."""

from __future__ import annotations

import posixpath
import re

from pipeline.image_formats import HEAD_BYTES, format_by_start
from pipeline.storage.store import FoundFile, retried
from pipeline.storage.stores import store_of

_IMAGE_NAME = re.compile(  # the formats of the second line are not decoded, and become dead letters
    r"\.(jpe?g|jpe|jfif|png|bmp|dib|gif|webp|tiff?|avif|hei[cf]|hif|jp2|j2k|jp[cfx]|p[bgpn]m|hdr|tga|(tf)?records?"
    r"|jxl|ico|icns|pcx|psd|exr|dng|cr[23]|nef|arw|orf|rw2|raf)$",
    re.IGNORECASE,
)
_ENDING = re.compile(r"\.[a-z0-9_]{1,10}")


def names_image(text: str) -> bool:
    """Whether a name, or a manifest's cell, ends like an image or a TFRecord file."""
    return _IMAGE_NAME.search(text) is not None


def begins_like_image(file: FoundFile) -> bool:
    """Whether a file begins like an image, by one request. True also for one that cannot be read: its reader explains why."""
    if file.generation and not file.size_bytes:
        return False
    try:
        return bool(format_by_start(retried(store_of(file.path).read_range)(file.path, 0, HEAD_BYTES)))
    except Exception:  # noqa: BLE001  whatever is wrong with it becomes its dead letter
        return True


def kind_of(path: str) -> str:
    """The kind of a file that is no image, as reports show it: its ending.

    >>> [kind_of(path) for path in ("in/a.jpg.JSON", "in/README", "in/.DS_Store", "a.so long an ending")]
    ['.json', 'no ending', 'no ending', 'other']
    """
    ending = posixpath.splitext(posixpath.basename(path))[1].lower()
    return ending if _ENDING.fullmatch(ending) else "other" if ending else "no ending"
