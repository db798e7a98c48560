"""URIs of images within other files: members of archives, and frames of videos."""

from __future__ import annotations

import posixpath
import re

_ARCHIVE = re.compile(r"(.*?\.(?:zip|tar|tgz|tbz2?|txz|tar\.(?:gz|bz2|xz)))(?:#(.+))?", re.IGNORECASE | re.DOTALL)
_VIDEO = re.compile(r"(.*?\.(?:mp4|m4v|mov|mkv|avi|webm))(?:#t=(\d{1,9})(?:\.(\d{1,3}))?)?", re.IGNORECASE | re.DOTALL)


def archive_member(name: str) -> tuple[str, str | None] | None:
    """The archive that a name means, and the name of the file in it; None where it names the whole archive, or none.

    >>> [archive_member(name) for name in ("a.zip", "gs://b/a.TAR.gz#c/d.jpg", "a.zip.jpg")]
    [('a.zip', None), ('gs://b/a.TAR.gz', 'c/d.jpg'), None]
    """
    found = _ARCHIVE.fullmatch(name)
    return (found[1], found[2]) if found else None


def video_frame(name: str) -> tuple[str, int | None] | None:
    """The video that a name means, and the time of the frame in milliseconds; None where it names the whole video, or none.

    >>> [video_frame(name) for name in ("a.mp4", "gs://b/*.MOV", "a.mkv#t=12.48", "a.mp4.jpg", "a.mp4#b")]
    [('a.mp4', None), ('gs://b/*.MOV', None), ('a.mkv', 12480), None, None]
    """
    found = _VIDEO.fullmatch(name)
    if not found:
        return None
    return found[1], int(found[2] + (found[3] or "").ljust(3, "0")) if found[2] else None


def without_ending(name: str) -> str:
    """The name of an image without its ending; the time of a frame is none.

    >>> without_ending("a/b.c.jpg"), without_ending("a.mp4#t=12.480"), without_ending("a.mp4#t=12.480.txt")
    ('a/b.c', 'a.mp4#t=12.480', 'a.mp4#t=12.480')
    """
    _, time_ms = video_frame(name) or ("", None)
    return posixpath.splitext(name)[0] if time_ms is None else name
