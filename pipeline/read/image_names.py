"""Recognises images by their names or first bytes, and names the kind of other files."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

from pipeline.image_formats import HEAD_BYTES, format_by_start
from pipeline.read.fetch import open_file
from pipeline.storage.cloud import read_range
from pipeline.storage.etag_stores import etag_store
from pipeline.storage.listing_backends import GS, FoundFile

_IMAGE_NAME = re.compile(  # the formats of the second line are not decoded, and become dead letters
    r"\.(jpe?g|jpe|jfif|png|bmp|dib|gif|webp|tiff?|avif|hei[cf]|hif|jp2|j2k|jp[cfx]|p[bgpn]m|hdr|tga|(tf)?records?"
    r"|jxl|ico|icns|pcx|psd|exr|dng|cr[23]|nef|arw|orf|rw2|raf)$",
    re.IGNORECASE,
)
_ENDING = re.compile(r"\.[a-z0-9_]{1,10}")


def names_image(text: str) -> bool:
    """Whether a name, or a manifest's cell, ends like an image or a TFRecord file."""
    return _IMAGE_NAME.search(text) is not None


def begins_like_image(file: FoundFile, read_head: Callable[[str], bytes] | None = None) -> bool:
    """Whether a file begins like an image. True also for a file that cannot be read: its reader explains why.

    Args:
      file: The file; one request reads its first bytes.
      read_head: Reads them; by default from storage.
    """
    if file.generation and not file.size_bytes:
        return False
    try:
        return bool(format_by_start(read_head(file.path) if read_head else _read_head(file.path)))
    except Exception:  # noqa: BLE001  whatever is wrong with it becomes its dead letter
        return True


def kind_of(path: str) -> str:
    """The kind of a file that is no image, as reports show it: its ending.

    >>> [kind_of(path) for path in ("in/a.jpg.JSON", "in/README", "in/.DS_Store", "a.so long an ending")]
    ['.json', 'no ending', 'no ending', 'other']
    """
    ending = posixpath.splitext(posixpath.basename(path))[1].lower()
    return ending if _ENDING.fullmatch(ending) else "other" if ending else "no ending"


def _read_head(path: str) -> bytes:
    if path.startswith(GS):
        return read_range(path, 0, HEAD_BYTES)
    if store := etag_store(path):
        return bytes(store.read_range(path, 0, HEAD_BYTES))
    with open_file(path) as file:
        head: bytes = file.read(HEAD_BYTES)
    return head
