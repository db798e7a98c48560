"""Reads the images of finished rows again: files, objects, web addresses, members of archives, and frames of videos."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

from models.base.image_uris import archive_member, video_frame
from models.evaluate.detection_rows import ImageRow, RowsError, one_of, unpacked
from pipeline.config.sections import ReadConfig
from pipeline.failures import Failure
from pipeline.listing.containers import images_in
from pipeline.listing.names import file_of
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.storage.fetch import fetch
from pipeline.storage.web import without_query

_READ = ReadConfig()
_RETRY_SECONDS = 10.0  # a person waits

Read = Callable[[], bytes | Failure]


def reads(rows: Iterable[ImageRow], folder: str) -> Iterator[tuple[ImageRow, Read]]:
    """Each row with a function that reads its image, or says why it cannot; it may run on any thread.

    An archive is read once, from its beginning to its end, and its images follow those of files.

    Args:
      rows: One for each image.
      folder: Where the images are now; empty: where the rows name them.
    """
    members: defaultdict[str, dict[str, ImageRow]] = defaultdict(dict)
    for row in rows:
        if archive_member(row.uri):
            members[file_of(row.uri)][row.uri] = row
        else:
            yield row, partial(_read, row.uri, folder)
    for archive, of_archive in members.items():
        yield from _reads_of_archive(archive, _place(archive, folder), of_archive)


def refuse_duplicates(rows: Sequence[ImageRow]) -> None:
    """Makes sure that each image has one row.

    Raises:
      RowsError: An image has several.
    """
    ((uri, times),) = Counter(row.uri for row in rows).most_common(1)
    if times > 1:
        first, second = islice((row for row in rows if row.uri == uri), 2)
        raise RowsError(f"{uri} has {times} rows, {one_of(first, second)}")


def local_file(uri: str, folder: str) -> str:
    """The absolute path of an image; empty if it is not on this disk."""
    path = uri.removeprefix("file://")
    parts = unpacked(path).split("/")
    places = [os.path.join(folder, *parts[n:]) for n in range(len(parts)) if parts[n]] if folder else [path]
    return next((os.path.abspath(place) for place in places if os.path.isfile(place)), "")


def _place(uri: str, folder: str) -> str:
    return local_file(uri, folder) if folder else uri.removeprefix("file://")


def _read(uri: str, folder: str) -> bytes | Failure:
    file = file_of(uri) if video_frame(uri) else uri
    place = _place(file, folder)
    if not place:
        return Failure("read", "not_found", f"{without_query(uri)} is not in the folder of --images")
    if not video_frame(uri):
        return _content(uri, fetch(ImageRef(place), _READ.max_file_bytes, retry_seconds=_RETRY_SECONDS))
    return _content(uri, next(images_in(ImageRef(place + uri.removeprefix(file)), _READ), None))


def _content(uri: str, found: EncodedImage | DeadLetter | Failure | str | None) -> bytes | Failure:
    if isinstance(found, EncodedImage):
        return found.content
    if isinstance(found, DeadLetter):
        return Failure(found.stage, found.reason, found.message)
    return found if isinstance(found, Failure) else Failure("read", "not_found", f"{uri} is not there")


def _reads_of_archive(archive: str, place: str, members: dict[str, ImageRow]) -> Iterator[tuple[ImageRow, Read]]:
    fault: DeadLetter | None = None  # of all members behind it
    for found in images_in(ImageRef(place), _READ) if place else ():
        if isinstance(found, str):
            continue
        if row := members.pop(archive + found.ref.uri.removeprefix(place), None):
            yield row, partial(_content, row.uri, found)
        elif found.ref.uri == place and isinstance(found, DeadLetter):
            fault = found
        if not members:
            return
    for uri, row in members.items():
        yield row, partial(_content, uri, fault)
