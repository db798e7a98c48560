"""Recognises images by their names or first bytes, and names the kind of other files."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

from pipeline.read.fetch import open_file
from pipeline.read.tfrecords import is_tfrecord
from pipeline.storage.cloud import read_range
from pipeline.storage.listing_backends import GS, FoundFile

_IMAGE_NAME = re.compile(  # the formats of the second line are not decoded, and become dead letters
    r"\.(jpe?g|jpe|jfif|png|bmp|dib|gif|webp|tiff?|avif|hei[cf]|hif|jp2|j2k|jp[cfx]|p[bgpn]m|hdr|tga|(tf)?records?"
    r"|jxl|ico|icns|pcx|psd|exr|dng|cr[23]|nef|arw|orf|rw2|raf)$",
    re.IGNORECASE,
)
_HEAD_BYTES = 32
_STARTS = (
    *(b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"BM"),
    *(b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),  # TIFF, BigTIFF
    *(b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"),  # JPEG 2000: in boxes, bare
    *(b"#?RADIANCE\n", b"#?RGBE\n"),
    *(b"P%d%c" % (kind, space) for kind in range(1, 7) for space in b" \t\r\n"),  # PNM
)
_BRANDS = frozenset({b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
_ENDING = re.compile(r"\.[a-z0-9_]{1,10}")


def names_image(text: str) -> bool:
    """Whether a name, or a manifest's cell, ends like an image or a TFRecord file."""
    return _IMAGE_NAME.search(text) is not None


def is_image_by_name(path: str) -> bool:
    """Whether a file is one to read by its name alone: an image, or a TFRecord file, numbered or gzipped as these may be."""
    return names_image(path) or is_tfrecord(path)


def begins_like_image(file: FoundFile, read_head: Callable[[str], bytes] | None = None) -> bool:
    """Whether a file begins like an image. True also for a file that cannot be read: its reader explains why.

    Args:
      file: The file; one request reads its first bytes.
      read_head: Reads them; by default from storage.
    """
    if file.generation and not file.size_bytes:
        return False
    try:
        return is_image_head(read_head(file.path) if read_head else _read_head(file.path))
    except Exception:  # noqa: BLE001  its reader makes a dead letter that says what is wrong
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
        return read_range(path, 0, _HEAD_BYTES)
    with open_file(path) as file:
        head: bytes = file.read(_HEAD_BYTES)
    return head


def is_image_head(head: bytes) -> bool:
    """Whether bytes begin like an image."""
    head = head[:_HEAD_BYTES]
    if head.startswith(_STARTS) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP"):
        return True
    box_bytes = min(int.from_bytes(head[:4], "big"), len(head))
    return head[4:8] == b"ftyp" and any(head[at : at + 4] in _BRANDS for at in (8, *range(16, box_bytes - 3, 4)))
