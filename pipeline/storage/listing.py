"""Streams all files that patterns match; lists many folders in parallel and in little memory."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice

from pipeline.errors import InputError
from pipeline.storage.globs import fixed_beginning, real_folder, real_path
from pipeline.storage.listing_backends import ListingBackend, LocalListing, ObjectListing, WebListing
from pipeline.storage.store import FoundFile
from pipeline.storage.stores import LISTED
from pipeline.storage.web import is_web

MAX_PARALLEL = 16  # folders listed in parallel; each waits for storage
_CHUNK = 250  # files of one place, before other places have their turn
_LIVE = re.compile(r"(rts[pm]|rtmp|rtp|udp|srt)\w?://.*|/dev/video\d*|\d{1,2}", re.DOTALL)  # cameras and live streams


def listing_backend_of(pattern: str) -> ListingBackend:
    """The place of the files that a user's pattern means.

    A folder stands for all files below it except hidden ones: a local folder, a bucket, and anything that ends with a slash.

    Raises:
      InputError: The pattern names no bucket, a camera, files of a web server, or storage that is not read.
    """
    if _LIVE.fullmatch(pattern) and not (os.path.isdir(pattern) or os.path.isfile(pattern)):
        message = (
            "live streams and cameras are not read; record them to files, e.g. with ffmpeg -f segment, and give their folder"
        )
        raise InputError(f"input {pattern}: {message}")
    if is_web(pattern):
        return _web_listing(pattern)
    if "://" in pattern:
        return _object_listing(pattern)
    if os.path.isfile(pattern):  # also when its name looks like a pattern
        folder, _, name = real_path(pattern).rpartition("/")
        return LocalListing(f"{folder}/", (glob.escape(name),))
    if os.path.isdir(pattern or "."):
        return LocalListing(real_folder(pattern), ("**",), hidden=False)
    folder, rest = _split(pattern)
    return LocalListing(real_folder(folder), rest, hidden=not pattern.endswith("/"))


def _object_listing(pattern: str) -> ListingBackend:
    scheme = pattern[: pattern.index("://") + 3]
    if scheme not in LISTED:
        message = (
            "expected files on this machine, gs://bucket/name, s3://bucket/name or abfs://container/name; copy the images first"
        )
        raise InputError(f"input {pattern}: cannot be listed: {message}")
    pattern += "/" * (pattern.count("/") == 2)
    folder, rest = _split(pattern)
    if folder.count("/") < 3 or folder[len(scheme)] == "/":
        raise InputError(f"input {pattern}: cannot be listed: expected {scheme}<bucket>/<name>")
    return ObjectListing(folder, rest, hidden=not pattern.endswith("/")).normalised()


def _web_listing(uri: str) -> WebListing:
    """The place of an address, whose query may have any characters."""
    if "*" in uri:
        raise InputError(f"input {uri}: web servers list no files; name images, or a manifest with their addresses")
    folder, slash, name = uri.partition("?")[0].rpartition("/")
    return WebListing(folder + slash, (name + uri[len(folder + slash + name) :],))


def divided(places: Iterable[ListingBackend], wanted: int) -> list[ListingBackend]:
    """Divides places into about as many as wanted, if looking at a few folders gives so many.

    Raises:
      InputError: A folder cannot be listed.
    """
    whole, rest = list[ListingBackend](), deque(places)
    while rest and len(whole) + len(rest) < wanted:
        place = rest.popleft()
        with _listed(place):
            parts = place.split_by_folder()
        if parts == [place]:
            whole.append(place)
        else:
            rest.extend(parts)
    return [*whole, *rest]


def files_in(place: ListingBackend, linked: dict[ListingBackend, ListingBackend] | None = None) -> Iterator[FoundFile]:
    """All files that match in a place, without places that links led to before, which `linked` has.

    Raises:
      InputError: It cannot be listed.
    """
    linked = {} if linked is None else linked
    listings: list[Iterator[FoundFile | ListingBackend]] = [iter([place])]
    with _listed(place):
        while listings:
            found = next(listings[-1], None)
            if found is None:
                listings.pop()
            elif isinstance(found, FoundFile):
                yield found
            elif not (isinstance(found, LocalListing) and found.at) or linked.setdefault(found.without_way(), found) is found:
                listings.append(found.entries())


def files_in_all(places: Iterable[ListingBackend]) -> Iterator[FoundFile]:
    """All files in several places, a few places in parallel; a slow consumer slows the listing down.

    Raises:
      InputError: A place cannot be listed.
    """
    waiting = iter(places)
    linked: dict[ListingBackend, ListingBackend] = {}
    running: dict[Future[list[FoundFile]], Iterator[FoundFile]] = {}
    with ThreadPoolExecutor(MAX_PARALLEL, "list-files") as pool:

        def go_on(files: Iterator[FoundFile]) -> None:
            running[pool.submit(lambda: list(islice(files, _CHUNK)))] = files

        for place in islice(waiting, MAX_PARALLEL):
            go_on(files_in(place, linked))
        while running:
            for ready in wait(running, return_when=FIRST_COMPLETED).done:
                files, chunk = running.pop(ready), ready.result()
                if len(chunk) == _CHUNK:
                    go_on(files)
                else:
                    for place in islice(waiting, 1):
                        go_on(files_in(place, linked))
                yield from chunk


@contextlib.contextmanager
def _listed(place: ListingBackend) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as err:
        raise InputError(f"input {place.pattern}: cannot be listed: {' '.join(str(err).split())[:300]}") from err


def _split(pattern: str) -> tuple[str, tuple[str, ...]]:
    """The fixed folder of a pattern, and the parts after it; for a folder, everything below it."""
    folder = fixed_beginning(pattern)
    folder = folder[: folder.rfind("/") + 1]
    parts = pattern[len(folder) :].split("/")
    return folder, (*parts[:-1], parts[-1] or "**")
