"""Listing backends: a place is a folder, on a local disk or on Cloud Storage, and the pattern that names below it must match.

A place yields entry by entry, so that memory stays flat, and can be divided, so that its parts are listed in parallel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Iterator
from itertools import islice

from pipeline.storage.globs import fixed_beginning, has_wildcard, real_folder, to_regex
from pipeline.storage.local import found_file
from pipeline.storage.store import FoundFile, retried
from pipeline.storage.stores import store_of

_LOOKED_AT = 10_000  # names read from one folder, to find out whether it can be divided


@dataclasses.dataclass(frozen=True)
class ListingBackend:
    """A folder, and the pattern that a path below it must match.

    Attributes:
      folder: Ends with a slash; a local one is absolute and free of links.
      rest: The pattern, split at its slashes. Only the last part may be without a wildcard.
      below: If the first part has `**`, the folder below `folder` to look in; empty, or ends with a slash.
      deeper: Whether to look in subfolders as well; for a plain name, whether it may be a folder.
      hidden: Whether names that begin with a dot match.
      above: The fixed folder of the pattern, if wildcards were replaced by names of folders since; else None.
    """

    folder: str
    rest: tuple[str, ...]
    below: str = ""
    deeper: bool = True
    hidden: bool = True
    above: str | None = None

    @property
    def named(self) -> str:
        """The folder that the user's pattern names."""
        return self.folder if self.above is None else self.above

    @property
    def here(self) -> str:
        """The folder to look in; ends with a slash."""
        return self.folder + self.below

    @property
    def pattern(self) -> str:
        """The whole pattern."""
        return self.folder + "/".join(self.rest)

    @property
    def is_recursive(self) -> bool:
        """Whether files in subfolders at any depth can match."""
        return self.deeper and "**" in self.rest[0]

    def matches(self, path: str) -> bool:
        """Whether a path below `folder` matches."""
        if not self.hidden and (path.startswith(".") or "/." in path):
            return False
        return to_regex("/".join(self.rest)).fullmatch(path) is not None

    def descend(self, name: str) -> ListingBackend | None:
        """The place of a subfolder, by its name; None if nothing in it can match."""
        first, *after = self.rest
        if "**" in first:
            wanted = self.deeper and (self.hidden or not name.startswith("."))
            return dataclasses.replace(self, below=f"{self.below}{name}/") if wanted else None
        if after and to_regex(first).fullmatch(name):
            place = dataclasses.replace(self, folder=f"{self.folder}{name}/", rest=tuple(after), above=self.named).normalised()
            return dataclasses.replace(place, deeper=has_wildcard(place.rest[0]))
        return None

    def normalised(self) -> ListingBackend:
        """The same place with the longest fixed folder."""
        known = next((n for n, part in enumerate(self.rest[:-1]) if has_wildcard(part)), len(self.rest) - 1)
        return dataclasses.replace(
            self, folder=self.folder + "".join(f"{part}/" for part in self.rest[:known]), rest=self.rest[known:]
        )

    def split_by_folder(self) -> list[ListingBackend]:
        """Divides this place, if looking at one folder is enough for that; else returns it alone."""
        if not (self.is_recursive or (self.rest[1:] and "**" not in self.rest[0])):
            return [self]
        names = list(islice(self._folders(), _LOOKED_AT + 1))
        if len(names) > _LOOKED_AT:
            return [self]
        parts = [part for part in map(self.descend, filter(None, names)) if part]
        return [dataclasses.replace(self, deeper=False), *parts] if self.is_recursive else parts

    def entries(self) -> Iterator[FoundFile | ListingBackend]:
        """Yields the files here that match, and the places below in which others may."""
        raise NotImplementedError

    def _folders(self) -> Iterator[str]:
        """The names of the subfolders, and an empty name for each file."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LocalListing(ListingBackend):
    """A place on a local disk. Links to folders are followed, and files have the names that they have in the real folder.

    Attributes:
      at: The real folder to look in, if a link below `folder` led there; else empty.
      way: The real folders of the links on the way; a link back to one of them is not followed.
    """

    at: str = ""
    way: tuple[str, ...] = ()

    @property
    def here(self) -> str:
        return self.at or super().here

    @property
    def in_any_folder(self) -> bool:
        """Whether the pattern is the same in all folders: `**`, or `**/` and a name."""
        return self.rest[0] == "**" and len(self.rest) <= 2

    def without_way(self) -> ListingBackend:
        """The same files, equal whichever links led to them."""
        return dataclasses.replace(self, way=(), below="" if self.in_any_folder else self.below)

    def descend(self, name: str) -> ListingBackend | None:
        place, path = super().descend(name), self.here + name
        if not isinstance(place, LocalListing):
            return None
        is_link, further = os.path.islink(path), place.folder[len(self.folder + name) :]
        if further:  # the pattern has no `**` yet, and so ends by itself
            return dataclasses.replace(place, folder=real_folder(path + further)) if is_link or further != "/" else place
        if not is_link:
            return dataclasses.replace(place, at=self.at and f"{path}/")
        at = real_folder(path)
        is_listed = at.startswith(self.folder) and (self.hidden or "/." not in at[len(self.folder) - 1 :])
        if (is_listed and self.in_any_folder) or any(folder.startswith(at) for folder in (*self.way, self.here)):
            return None
        return dataclasses.replace(place, at=at, way=(*self.way, self.here))

    def entries(self) -> Iterator[FoundFile | ListingBackend]:
        """Lists one folder. A folder that cannot be read is yielded as a file, so that its reader reports the error."""
        if not has_wildcard(self.rest[0]):
            yield from _found(self.here + self.rest[0])
            return
        for entry in _entries(self.here):
            if entry is None:
                yield FoundFile(self.here.rstrip("/") or self.here)
            elif _is_folder(entry):
                place = self.descend(entry.name)
                if place:
                    yield place
            elif self.matches(self.below + entry.name):
                yield from _found(self.here + entry.name, entry)

    def _folders(self) -> Iterator[str]:
        for entry in _entries(self.here):
            yield entry.name if entry and _is_folder(entry) else ""


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return os.path.isdir(entry) if entry.is_symlink() else entry.is_dir(follow_symlinks=False)


def _entries(folder: str) -> Iterator[os.DirEntry[str] | None]:
    """The entries of a folder, none if it is gone; None if the system refuses to list (all of) them."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError:
        yield None


def _found(path: str, entry: os.DirEntry[str] | None = None) -> Iterator[FoundFile]:
    """The file at a path, unless that is a folder, or missing, or a link to either."""
    try:
        status = entry.stat() if entry else os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError:
        yield FoundFile(path)
        return
    if not stat.S_ISDIR(status.st_mode):
        yield found_file(path, status)


@dataclasses.dataclass(frozen=True)
class ObjectListing(ListingBackend):
    """A place on object storage, where folders are prefixes of names."""

    @property
    def _by_folder(self) -> bool:
        return "**" not in self.rest[0] and not all(map(has_wildcard, self.rest[1:]))

    @property
    def _one_folder(self) -> bool:
        return self._by_folder or not (self.is_recursive or (self.rest[1:] and "**" not in self.rest[0]))

    def entries(self) -> Iterator[FoundFile | ListingBackend]:
        """Lists one folder, or all below it if the rest of the pattern cannot save a request."""
        if not has_wildcard(self.rest[0]):
            yield from self._named()
            return
        for found in self._list(self._one_folder):
            if isinstance(found, str):
                place = self.descend(found) if self._by_folder else None
                if place:
                    yield place
            elif not found.path.endswith("/") and self.matches(found.path[len(self.folder) :]):
                yield found

    def _named(self) -> Iterator[FoundFile | ListingBackend]:
        """The object of this name; without one, the folder of this name, if the pattern may mean a folder."""
        from google.api_core.exceptions import NotFound

        name = self.here + self.rest[0]
        try:
            yield retried(store_of(name).look_up)(name)
        except NotFound:
            if self.deeper:
                yield ObjectListing(f"{name}/", ("**",), hidden=False)

    def _folders(self) -> Iterator[str]:
        for found in self._list(one_folder=True):
            yield found if isinstance(found, str) else ""

    def _list(self, one_folder: bool) -> Iterator[FoundFile | str]:
        """Objects page by page, and the names of subfolders if only one folder is listed."""
        return store_of(self.here).list_folder(self.here, "" if self.below else fixed_beginning(self.rest[0]), one_folder)


@dataclasses.dataclass(frozen=True)
class WebListing(ListingBackend):
    """One web address; web servers list nothing."""

    def entries(self) -> Iterator[FoundFile | ListingBackend]:
        """The image at this address, unless there is none."""
        from google.api_core.exceptions import NotFound

        with contextlib.suppress(NotFound):
            yield store_of(self.pattern).look_up(self.pattern)
