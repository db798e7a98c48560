"""Streams all files that patterns match; lists many folders in parallel and in little memory.

A location is a folder, on a local disk or on object storage, and a pattern of the paths below it. It yields entry by entry, so
that memory stays flat, and can be divided, so that its parts are listed in parallel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice, pairwise

from pipeline.errors import InputError
from pipeline.storage.globs import fixed_beginning, has_wildcard, real_folder, real_path, to_regex
from pipeline.storage.name_ranges import NameRange, split_points
from pipeline.storage.store import EVERY_NAME, FoundFile, kind_of_error
from pipeline.storage.stores import LISTED, look_up, store_of
from pipeline.storage.web import is_web

MAX_PARALLEL = 16  # folders listed in parallel; each waits for storage
_CHUNK = 250  # files of one location, before other locations have their turn
_LOOKED_AT = 10_000  # names read from one folder, to find out whether it can be divided


@dataclasses.dataclass(frozen=True)
class Location:
    """A folder in which to look for what a pattern means.

    Links to local folders are followed, and files have the names that they have in the real folder.

    Attributes:
      folder: The folder that the pattern names; ends with a slash. A local one is absolute and free of links.
      parts: The pattern of paths below it, split at its slashes. The first one has a wildcard, or is the only one.
      hidden: Whether names that begin with a dot match.
      below: The path from `folder` to the folder to look in; empty, or ends with a slash.
      deeper: Whether to look in subfolders as well.
      real: The real folder to look in, if a link led there; else empty.
      way: The folders of the links on the way; a link back to one of them is not followed.
      names: Paths that are listed.
    """

    folder: str
    parts: tuple[str, ...]
    hidden: bool = True
    below: str = ""
    deeper: bool = True
    real: str = ""
    way: tuple[str, ...] = ()
    names: NameRange = EVERY_NAME

    @property
    def pattern(self) -> str:
        """The whole pattern; `location_of` makes this location of it, too."""
        whole = self.folder + "/".join(self.parts)
        return whole if self.hidden else whole.removesuffix("**")

    @property
    def here(self) -> str:
        """The folder to look in; ends with a slash."""
        return self.real or self.folder + self.below

    @property
    def identity(self) -> tuple[str, str]:
        """Equal for two locations with the same files, whichever links led to them."""
        return self.here, "" if self._in_any_folder else self.below

    @property
    def _depth(self) -> int:
        return self.below.count("/")

    @property
    def _is_recursive(self) -> bool:
        """Whether files in subfolders at any depth can match."""
        return any("**" in part for part in self.parts[: self._depth + 1])

    @property
    def _in_any_folder(self) -> bool:
        """Whether the pattern means the same in all folders: `**`, or `**/` and a name."""
        return self.parts[0] == "**" and len(self.parts) <= 2

    def matches(self, path: str) -> bool:
        """Whether a path below `folder` matches."""
        if not self.hidden and (path.startswith(".") or "/." in path):
            return False
        return to_regex("/".join(self.parts)).fullmatch(path) is not None

    def holds(self, path: str) -> bool:
        """Whether the pattern names a file."""
        return path.startswith(self.folder) and self.matches(path[len(self.folder) :])

    def descend(self, name: str) -> Location | None:
        """The location of a subfolder; None if nothing in it can match, or a link leads to what is listed anyway."""
        recursive, depth = self._is_recursive, self._depth
        if recursive:
            if not self.deeper or (name.startswith(".") and not self.hidden):
                return None
        elif depth + 1 == len(self.parts) or not to_regex(self.parts[depth]).fullmatch(name):
            return None
        path = self.here + name
        location = dataclasses.replace(self, below=f"{self.below}{name}/", real=self.real and f"{path}/")
        if "://" in path or not os.path.islink(path):
            return location
        real, way = real_folder(path), (*self.way, self.here)
        is_listed = real.startswith(self.folder) and (self.hidden or "/." not in real[len(self.folder) - 1 :])
        if recursive and ((is_listed and self._in_any_folder) or any(folder.startswith(real) for folder in way)):
            return None
        return dataclasses.replace(location, real=real, way=way)

    def _link_back(self, name: str) -> FoundFile | None:
        """A subfolder that is a link to a folder above what is listed, whose other files are not."""
        path = self.here + name
        if "://" in path or not self._is_recursive or not os.path.islink(path):
            return None
        real, way = real_folder(path), (*self.way, self.here)
        is_listed = real.startswith(self.folder) or real in way
        return FoundFile(path) if not is_listed and any(folder.startswith(real) for folder in way) else None

    def split(self) -> list[Location]:
        """Divides this location by its folders, and a folder of many names by ranges of them; else returns it alone."""
        recursive, is_last = self._is_recursive, self._depth + 1 == len(self.parts)
        has_ranges = store_of(self.here).lists_ranges and (recursive or (is_last and has_wildcard(self.parts[-1])))
        if not self.deeper or self.names != EVERY_NAME or not (recursive or not is_last or has_ranges):
            return [self]
        found = list(islice(self._list(one_folder=True), _LOOKED_AT + 1))
        if len(found) > _LOOKED_AT:
            return self._ranges(found) if has_ranges else [self]
        if (not recursive and is_last) or any(isinstance(each, FoundFile) and each.fault for each in found):
            return [self]  # whoever lists it reports its fault
        parts = [part for name in found if isinstance(name, str) and (part := self.descend(name))]
        return [dataclasses.replace(self, deeper=False), *parts] if recursive else parts

    def _ranges(self, first: Sequence[FoundFile | str]) -> list[Location]:
        """Divides a folder with these first names, and all below it."""
        names = sorted(f"{self.here}{each}/" if isinstance(each, str) else each.path for each in first)

        def first_behind(path: str) -> str | None:
            found = next(self._list_range(NameRange(path), at_once=1), None)
            return found.path if found else None

        points = split_points(names, first_behind, MAX_PARALLEL, len(self.here))
        return [dataclasses.replace(self, names=NameRange(*ends)) for ends in pairwise(["", *points, ""])]

    def entries(self) -> Iterator[FoundFile | Location]:
        """Yields the files here that match, and the locations below in which others may.

        A local folder that cannot be listed is yielded with its fault. A link that leads nowhere, and one to a folder above, are
        yielded as files, so that their reader reports the error.
        """
        recursive, later = self._is_recursive, self.parts[self._depth + 1 :]
        if not recursive and (is_web(self.folder) or not has_wildcard(self.parts[self._depth])):
            yield from self._named(self.parts[self._depth])
            return
        # on object storage all folders below are listed at once, unless the rest of the pattern saves requests
        one_folder = not self.deeper if recursive else not later or not all(map(has_wildcard, later))
        start = len(self.here)
        for found in self._list(one_folder):
            if isinstance(found, str):
                if below := self.descend(found) or self._link_back(found):
                    yield below
            elif found.path.endswith("/"):  # an object that stands for a folder
                continue
            elif not (name := found.path[start:]):
                yield found
            elif self.matches(self.below + name) and (file := found if found.generation else _looked_up(found)):
                yield file

    def _named(self, name: str) -> Iterator[FoundFile | Location]:
        """What has this name: a folder, or an object; without that the folder of this name, if the pattern may mean one."""
        if self._depth + 1 < len(self.parts):
            yield from filter(None, [self.descend(name)])
        elif file := look_up(self.here + name):
            yield file
        elif self.folder.startswith(LISTED) and not self.below:
            yield Location(f"{self.folder}{name}/", ("**",), hidden=False)

    def _list(self, one_folder: bool) -> Iterator[FoundFile | str]:
        """The files of a folder, or of all below it, and the names of subfolders if only one is listed.

        Of a range of names, files below the folder are listed, too, since a subfolder may lie in several ranges.
        """
        if self.names != EVERY_NAME:
            return self._list_range(self.names)
        return store_of(self.here).list_folder(self.here, self._beginning, one_folder)

    def _list_range(self, names: NameRange, at_once: int | None = None) -> Iterator[FoundFile]:
        listed = store_of(self.here).list_folder(self.here, self._beginning, False, names, at_once)
        return (found for found in listed if isinstance(found, FoundFile) and names.holds(found.path))

    @property
    def _beginning(self) -> str:
        """Of the names in the folder that can match."""
        began = any("**" in part for part in self.parts[: self._depth])
        return "" if began else fixed_beginning(self.parts[self._depth])


def _looked_up(file: FoundFile) -> FoundFile | None:
    """A local file with its size and generation; itself if it is a link to nothing, None if it is gone."""
    return look_up(file.path) or (file if os.path.islink(file.path) else None)


def location_of(pattern: str) -> Location:
    """The location of the files that a user's pattern means.

    A folder stands for all files below it except hidden ones: a local folder, a bucket, and anything that ends with a slash.

    Raises:
      InputError: The pattern names no bucket, files of a web server, or storage that is not read.
    """
    if is_web(pattern):
        if "*" in pattern:
            raise InputError(f"input {pattern}: web servers list no files; name images, or a manifest with their addresses")
        folder = pattern[: pattern.partition("?")[0].rfind("/") + 1]  # the query may have any characters
        return Location(folder, (pattern[len(folder) :],))
    if "://" not in pattern and os.path.isfile(pattern):  # also when its name looks like a pattern
        folder, _, name = real_path(pattern).rpartition("/")
        return Location(f"{folder}/", (glob.escape(name),))
    if "://" not in pattern and os.path.isdir(pattern or "."):
        return Location(real_folder(pattern), ("**",), hidden=False)
    scheme = pattern[: pattern.index("://") + 3] if "://" in pattern else ""
    if scheme and scheme not in LISTED:
        message = (
            "expected files on this machine, gs://bucket/name, s3://bucket/name or abfs://container/name; "
            "copy the images there first, or record the live stream"
        )
        raise InputError(f"input {pattern}: cannot be listed: {message}")
    if scheme and pattern.count("/") == 2:
        pattern += "/"
    folder = fixed_beginning(pattern)
    folder = folder[: folder.rfind("/") + 1]
    if scheme and (folder.count("/") < 3 or folder[len(scheme)] == "/"):
        raise InputError(f"input {pattern}: cannot be listed: expected {scheme}<bucket>/<name>")
    *parts, last = pattern[len(folder) :].split("/")
    return Location(folder if scheme else real_folder(folder), (*parts, last or "**"), hidden=not pattern.endswith("/"))


def files_of(folder: str, pattern: str = "*") -> Iterator[FoundFile]:
    """The files in one folder, hidden ones, too; none if it is not there. `**`: on object storage all below it."""
    found = (found for found in Location(f"{folder}/", (pattern,)).entries() if isinstance(found, FoundFile))
    return (file for file in found if file.generation or os.path.exists(file.path) or not os.path.islink(file.path))


def divided(locations: Iterable[Location], wanted: int) -> list[Location]:
    """Divides locations into about as many as wanted, if looking at a few folders gives so many, or ranges of many names.

    Raises:
      InputError: A folder cannot be listed.
      AwayError: Its store does not answer.
    """
    whole, rest = list[Location](), deque(locations)
    while rest and len(whole) + len(rest) < wanted:
        location = rest.popleft()
        with _listed(location):
            parts = location.split()
        if parts == [location]:
            whole.append(location)
        else:
            rest.extend(parts)
    return [*whole, *rest]


class Linked:
    """What links have led several listings to; thread-safe, shared by those that run in parallel.

    Args:
      locations: All that is listed.
    """

    def __init__(self, locations: Iterable[Location]):
        self._places = {(place.folder, place.parts, place.hidden): place for place in locations}.values()
        self._folders: dict[tuple[str, str], Location] = {}
        self._files: dict[int, FoundFile] = {}

    def is_new_folder(self, location: Location) -> bool:
        """Whether a location is to be listed: no link led there, or this is the first one."""
        return not location.way or self._folders.setdefault(location.identity, location) is location

    def is_new_file(self, file: FoundFile, location: Location) -> bool:
        """Whether a file of a location counts: no link led there, or it is found no other way."""
        if not location.way:
            return True
        if any(place.holds(file.path) for place in self._places):
            return False
        return self._files.setdefault(hash(file.path), file) is file


def files_in(location: Location, linked: Linked | None = None) -> Iterator[FoundFile]:
    """All files that match in a location, each once, whichever links lead to it.

    Args:
      location: Where to look.
      linked: What links have led other listings to.

    Raises:
      InputError: It cannot be listed.
      AwayError: Its store does not answer.
    """
    linked = linked or Linked([location])
    listings: list[tuple[Location, Iterator[FoundFile | Location]]] = [(location, iter([location]))]
    with _listed(location):
        while listings:
            found = next(listings[-1][1], None)
            if found is None:
                listings.pop()
            elif isinstance(found, FoundFile):
                if linked.is_new_file(found, listings[-1][0]):
                    yield found
            elif linked.is_new_folder(found):
                listings.append((found, found.entries()))


def files_in_all(locations: Iterable[Location]) -> Iterator[FoundFile]:
    """All files in several locations, a few in parallel; a slow consumer slows the listing down.

    Raises:
      InputError: A location cannot be listed.
      AwayError: Its store does not answer.
    """
    locations = list(locations)
    linked = Linked(locations)
    waiting = (files_in(location, linked) for location in locations)
    running: dict[Future[list[FoundFile]], Iterator[FoundFile]] = {}
    with ThreadPoolExecutor(MAX_PARALLEL, "list-files") as pool:

        def go_on(several: Iterable[Iterator[FoundFile]]) -> None:
            running.update({pool.submit(list, islice(files, _CHUNK)): files for files in several})

        go_on(islice(waiting, MAX_PARALLEL))
        while running:
            for ready in wait(running, return_when=FIRST_COMPLETED).done:
                files, chunk = running.pop(ready), ready.result()
                go_on([files] if len(chunk) == _CHUNK else islice(waiting, 1))
                yield from chunk


@contextlib.contextmanager
def _listed(location: Location) -> Iterator[None]:
    try:
        yield
    except Exception as err:
        kind = kind_of_error(err, InputError)
        raise kind(f"input {location.pattern}: cannot be listed: {' '.join(str(err).split())[:300]}") from err
