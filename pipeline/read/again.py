"""Reads the images of finished rows again: files, objects, web addresses, members of archives, and frames of videos."""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from models.evaluate.detection_rows import ImageRow, RowsError, unpacked
from models.progress import printable
from pipeline.config.sections import DetectConfig, ReadConfig
from pipeline.failures import ImageError
from pipeline.read.archives import images_of_archive
from pipeline.read.fetch import fetch
from pipeline.read.names import file_of, is_archive, is_video
from pipeline.read.videos import images_of_video
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.storage.web import without_query

_MAX_BYTES = int(ReadConfig().max_file_mb * 1e6)

Read = Callable[[], bytes]


def reads(rows: Iterable[ImageRow], folder: str, stopped: threading.Event) -> Iterator[tuple[ImageRow, Read]]:
    """Each row with a function that reads its image; it may run on any thread.

    An archive is read once, from its beginning to its end, and its images follow those of files. A function raises an
    `ImageError` if the image cannot be read.

    Args:
      rows: One for each image.
      folder: Where the images are now; empty: where the rows name them.
      stopped: Once set, reads that fail are not retried.
    """
    members: defaultdict[str, dict[str, ImageRow]] = defaultdict(dict)
    for row in rows:
        if is_archive(row.uri):
            members[file_of(row.uri)][row.uri] = row
        else:
            yield row, partial(_read, row.uri, folder, stopped)
    for archive, of_archive in members.items():
        yield from _reads_of_archive(archive, _location(archive, folder), of_archive)


def refuse_doubled(rows: Sequence[ImageRow]) -> None:
    """Makes sure that each image has one row.

    Raises:
      RowsError: An image has several.
    """
    ((uri, times),) = Counter(row.uri for row in rows).most_common(1)
    if times > 1:
        raise RowsError(
            f"{printable(uri)} has several rows, as of several models or versions; export one, or compact with --keep latest"
        )


def local_file(uri: str, folder: str) -> str:
    """The absolute path of an image; empty if it is not on this disk."""
    path = uri.removeprefix("file://")
    parts = unpacked(path).split("/")
    places = [os.path.join(folder, *parts[n:]) for n in range(len(parts)) if parts[n]] if folder else [path]
    return next((os.path.abspath(place) for place in places if os.path.isfile(place)), "")


def _location(uri: str, folder: str) -> str:
    return local_file(uri, folder) if folder else uri.removeprefix("file://")


def _not_there(uri: str, folder: str) -> ImageError:
    return ImageError("read", "not_found", f"{without_query(uri)} is not {'in the folder of --images' if folder else 'there'}")


def _read(uri: str, folder: str, stopped: threading.Event) -> bytes:
    def give_up(err: Exception) -> None:
        if stopped.is_set():
            raise err

    file = file_of(uri) if is_video(uri) else uri
    location = _location(file, folder)
    if not location:
        raise _not_there(uri, folder)
    if is_video(uri):
        return _content(next(images_of_video(ImageRef(location + uri[len(file) :]), 1.0, DetectConfig().max_megapixels)))
    return fetch(ImageRef(location), _MAX_BYTES, on_failure=give_up)[0]


def _reads_of_archive(archive: str, location: str, members: dict[str, ImageRow]) -> Iterator[tuple[ImageRow, Read]]:
    failure: DeadLetter | None = None
    for found in images_of_archive(ImageRef(location), _MAX_BYTES) if location else ():
        if isinstance(found, str):
            continue
        if row := members.pop(archive + found.ref.uri.removeprefix(location), None):
            yield row, partial(_content, found)
        elif found.ref.uri == location and isinstance(found, DeadLetter):
            failure = found
        if not members:
            return
    for row in members.values():
        yield row, partial(_content, failure or _not_there(row.uri, "").dead_letter(ImageRef(row.uri)))


def _content(found: EncodedImage | DeadLetter) -> bytes:
    if isinstance(found, DeadLetter):
        raise ImageError(found.stage, found.reason, found.message)
    return found.content
