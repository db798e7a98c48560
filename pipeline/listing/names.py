"""What a name says: an image, or a TFRecord file, archive or video, which hold images; or a part of one of these."""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Callable

from models.base.image_uris import archive_member, video_frame
from pipeline.config.paths import local_path
from pipeline.failures import Failure
from pipeline.storage.globs import real_folder, real_path

_IMAGE = re.compile(  # the formats of the second line are not decoded, and become dead letters
    r"\.(jpe?g|jpe|jfif|png|bmp|dib|gif|webp|tiff?|avif|hei[cf]|hif|jp2|j2k|jp[cfx]|p[bgpn]m|hdr|tga"
    r"|jxl|ico|icns|pcx|psd|exr|dng|cr[23]|nef|arw|orf|rw2|raf)$",
    re.IGNORECASE,
)
_RECORDS = re.compile(r"(.*\.(?:tf)?records?(?:[-_*?\[][^./]*?)?(?:\.gz)?)(?:@(\d{1,18})-(\d{0,18}))?", re.IGNORECASE | re.DOTALL)
_ENDING = re.compile(r"\.[a-z0-9_]{1,10}")
_OF_MACOS = "._* of macOS"  # the kind of AppleDouble files
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Control characters of ASCII, which no name of an image may have; any other character may be in it."""


def bad_name(name: str) -> Failure:
    """The failure of a name with control characters."""
    return Failure("read", "bad_name", f"expected a name without control characters, got {name[:200]!r}")


def record_range(name: str) -> tuple[str, int, int | None] | None:
    """The TFRecord file that a name means, and where the range of its bytes begins and ends; None where it names no such file.

    Such a file ends in `.tfrecord` or `.record`, with an `s` or not, numbered, gzipped.

    >>> [record_range(name) for name in ("a.tfrecords.gz", "a.record-0-of-9@12-120", "a.tfrecord@5-", "a@1-2.jpg")]
    [('a.tfrecords.gz', 0, None), ('a.record-0-of-9', 12, 120), ('a.tfrecord', 5, None), None]
    """
    found = _RECORDS.fullmatch(name)
    return (found[1], int(found[2] or 0), int(found[3]) if found[3] else None) if found else None


def is_container(name: str) -> bool:
    """Whether a name or pattern is that of TFRecord files, archives or videos, or of a part of one."""
    if "#" not in name and _IMAGE.search(name):  # most names; the other patterns take longer
        return False
    return bool(record_range(name) or archive_member(name) or video_frame(name))


def names_image(name: str) -> bool:
    """Whether a name, or a manifest's cell, ends like that of an image or a container."""
    return _IMAGE.search(name) is not None or is_container(name)


def file_of(uri: str) -> str:
    """The file of a part of a container; any other name is that of a file itself.

    >>> [file_of(uri) for uri in ("a.zip#b.jpg", "a.mp4#t=12.480", "a.tfrecord@0-120", "a#b@c.jpg")]
    ['a.zip', 'a.mp4', 'a.tfrecord', 'a#b@c.jpg']
    """
    found = archive_member(uri) or video_frame(uri) or record_range(uri)
    return found[0] if found else uri


def full_name(uri: str, real_folder: Callable[[str], str] = real_folder) -> str:
    """The one name of an image or a part of a container: of a local one, also as a `file:` URI, see `real_path`; a URI stays."""
    path = file = file_of(uri)
    if file.lower().startswith("file:"):
        with contextlib.suppress(ValueError):  # of another machine
            path = local_path(file)
    return real_path(path, real_folder) + uri[len(file) :]


def is_of_macos(path: str) -> bool:
    """Whether a file is what macOS adds beside one on a disk that keeps no attributes: `._<name>`, AppleDouble, no image.

    >>> is_of_macos("photos/._a.jpg"), is_of_macos("._photos/a.jpg")
    (True, False)
    """
    return "._" in path and path.rpartition("/")[2].startswith("._")  # of few names, and quick to tell


def kind_of(path: str) -> str:
    """The kind of a file that is no image, as reports show it: its ending.

    >>> [kind_of(path) for path in ("in/a.jpg.JSON", "in/README", "in/.DS_Store", "a.so long an ending", "in/._a.jpg")]
    ['.json', 'no ending', 'no ending', 'other', '._* of macOS']
    """
    if is_of_macos(path):
        return _OF_MACOS
    ending = posixpath.splitext(posixpath.basename(path))[1].lower()
    return ending if _ENDING.fullmatch(ending) else "other" if ending else "no ending"
