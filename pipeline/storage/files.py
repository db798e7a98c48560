"""Files, local or on object storage, through Beam's file systems: written whole or not at all, read line by line.

A file survives a power cut once `sync` was called for it, and its name once `sync` was called for its folder. What is relied upon
is synced before anything is acknowledged, renamed over or deleted for it. Objects are durable once they are written.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import posixpath
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from apache_beam.io.filesystem import BeamIOError
from apache_beam.io.filesystems import FileSystems

from pipeline.storage.cloud import delete_object, move_object, read_range, write_object
from pipeline.storage.globs import escape_glob
from pipeline.storage.listing import MAX_PARALLEL
from pipeline.storage.listing_backends import GS, generation_of

UNFINISHED = ".staging-"  # begins the name of every file and folder that no reader should look at; so it is hidden as well
_AS_IT_IS = "uncompressed"  # Beam would gzip by a file's ending otherwise
_PART_BYTES = 1 << 20  # of an object at once; Beam's reader takes 16 MB
# what is gone is synced under its new name; file systems that sync no folders, and folders that may not be read
_NOT_SYNCED = (errno.ENOENT, errno.EINVAL, errno.ENOTSUP, errno.EACCES)

_Answer = TypeVar("_Answer")


def create(path: str) -> Any:
    """A new file to write bytes to; a local folder that is missing is made. The file is durable once `sync` was called."""
    make_folder(posixpath.dirname(path))
    return FileSystems.create(path, compression_type=_AS_IT_IS)


def write_file(path: str, content: bytes, staging: str = "") -> None:
    """Writes a whole file: under its final name there is all of it or nothing, also while two do so at once, and it is durable.

    Args:
      path: Its name; a folder that is missing is made.
      content: All of it.
      staging: Folder for what a kill leaves, on the same disk; without it that is a hidden file beside. An object leaves nothing.
    """
    write_files({path: content}, staging)


def write_files(contents: Mapping[str, bytes], staging: str = "") -> None:
    """Writes some whole files, each as `write_file` does; together they take as long as one to be durable."""
    objects, others = _divided(contents)
    _in_parallel(lambda path: write_object(path, contents[path]), objects)
    staged: dict[str, str] = {}
    for path in others:
        # not made of the file's name, which may be as long as names can be
        staged[posixpath.join(staging or posixpath.dirname(path), UNFINISHED + uuid.uuid4().hex[:12])] = path
    for each, path in staged.items():
        with create(each) as file:
            file.write(contents[path])
        make_folder(posixpath.dirname(path))
    sync(staged)
    if staged:
        FileSystems.rename([*staged], [*staged.values()])
    sync(folders_of(others))


def sync(paths: Iterable[str]) -> None:
    """Makes the content of local files, and the names in local folders, survive a power cut.

    Args:
      paths: Files and folders; what is gone is left out, and so are objects.

    Raises:
      OSError: The disk could not take what was written.
    """
    _in_parallel(_sync, [path for path in {*paths} if "://" not in path])


def _sync(path: str) -> None:
    try:
        opened = os.open(path or ".", os.O_RDONLY)
        try:
            os.fsync(opened)  # also what others have written to it
        finally:
            os.close(opened)
    except OSError as err:
        if err.errno not in _NOT_SYNCED:
            raise


def begin_sync(path: str) -> None:
    """Starts to write a local file's content to the disk, and does not wait, so that a later `sync` of it takes less time."""
    if "://" not in path:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def folders_of(paths: Iterable[str]) -> set[str]:
    """The folders that have the names of files."""
    return {posixpath.dirname(path) for path in paths}


def write_once(path: str, content: bytes) -> bool:
    """Writes a whole file where none has its name; whether it did. On Cloud Storage, of several at once just one does."""
    if path.startswith(GS):
        return write_object(path, content, once=True)
    if exists(path):
        return False
    write_file(path, content)
    return True


def read_file(path: str) -> bytes:
    """All bytes of a file."""
    with FileSystems.open(path, compression_type=_AS_IT_IS) as file:
        content: bytes = file.read()
    return content


def read_lines(path: str) -> Iterator[bytes]:
    """The lines of a file, as they are."""
    # an object's reader has no `peek`, so that its own `readline` would fetch byte by byte
    with FileSystems.open(path, compression_type=_AS_IT_IS) as file, io.BufferedReader(file, 1 << 18) as lines:
        yield from lines


@contextlib.contextmanager
def open_part(path: str, start: int, size_bytes: int) -> Iterator[io.BufferedReader]:
    """A part of a file as a file: `size_bytes` from the byte `start` on; of an object no more is fetched than that."""
    with contextlib.ExitStack() as stack:
        if path.startswith(GS):
            fetch = functools.partial(read_range, path)
        else:
            fetch = functools.partial(_seek_and_read, stack.enter_context(FileSystems.open(path, compression_type=_AS_IT_IS)))
        yield stack.enter_context(io.BufferedReader(_Part(fetch, start, start + size_bytes), _PART_BYTES))


def _seek_and_read(file: Any, start: int, end: int) -> bytes:
    file.seek(start)
    return bytes(file.read(end - start))


class _Part(io.RawIOBase):
    def __init__(self, fetch: Callable[[int, int], bytes], start: int, end: int) -> None:
        self._fetch = fetch
        self._next, self._end = start, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        end = min(self._end, self._next + len(buffer))
        content = self._fetch(self._next, end) if end > self._next else b""
        buffer[: len(content)] = content
        self._next += len(content)
        return len(content)


def list_files(pattern: str) -> list[str]:
    """The paths that match a pattern of Beam's file systems, sorted."""
    return sorted(entry.path for match in FileSystems.match([pattern]) for entry in match.metadata_list)


def delete_files(paths: Iterable[str]) -> None:
    """Deletes files by their very names, objects in any order; one that is gone already is no error."""
    objects, others = _divided(paths)
    _in_parallel(delete_object, objects)
    for path in others:
        if "://" not in path:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
        elif FileSystems.exists(path):
            FileSystems.delete([escape_glob(path)])


def delete_if_generation_match(generations: Mapping[str, str]) -> None:
    """Deletes files unless somebody has overwritten them meanwhile; they are gone for good when this returns.

    Args:
      generations: Path -> its generation (see `generations_of`).
    """
    objects, others = _divided(generations)
    _in_parallel(lambda path: delete_object(path, generations[path]), objects)
    for path in others:
        if generation_of(path) == generations[path]:
            delete_files([path])
    sync(folders_of(others))


def exists(path: str) -> bool:
    """Whether a file is there."""
    if path.startswith(GS):
        return bool(generation_of(path))  # Beam would make a client for it, and connect anew
    found: bool = FileSystems.exists(path)
    return found


def generations_of(paths: Iterable[str]) -> dict[str, str]:
    """Those of some files that are there, each with its generation (see `places.generation_of`)."""

    def look(path: str) -> str:
        return generation_of(path) or ("" if path.startswith(GS) or not exists(path) else "unknown")

    paths = list(paths)
    return {path: generation for path, generation in zip(paths, _in_parallel(look, paths), strict=True) if generation}


def move_files(names: Mapping[str, str]) -> None:
    """Gives files other names, replacing what has them; may be called again, and by several at once.

    They are durable before they replace anything, and their names are when this returns.

    Args:
      names: Path -> new path.

    Raises:
      FileNotFoundError: A file is neither there nor has it its new name already; none was moved.
      BeamIOError: Storage fails.
    """
    for folder in folders_of(names.values()):
        make_folder(folder)
    before: dict[str, str] = {}
    while True:
        left = generations_of(names)
        # in this order: what another one moves meanwhile has its new name before it loses the old one
        gone = [final for path, final in names.items() if path not in left]
        missing = gone and sorted({*gone} - {*generations_of(gone)})
        if missing:
            raise FileNotFoundError(
                f"{missing[0]} is neither in staging nor under its name; did somebody remove the staging folder?"
            )
        try:
            sync(left)
            if _rename({path: names[path] for path in left}, left):
                sync(folders_of(names.values()))  # also of those that were moved before a kill
                return
        except BeamIOError:  # for what another one has moved meanwhile, and which is not there the next time
            if left == before:
                raise
            before = left


def move_if_generation_match(names: Mapping[str, str], generations: Mapping[str, str]) -> None:
    """Gives files other names unless somebody has moved or overwritten them meanwhile.

    Args:
      names: Path -> new path, which is replaced.
      generations: Path -> its generation (see `generations_of`).
    """
    objects, others = _divided(names)
    _rename({path: names[path] for path in objects}, generations)
    move_files({path: names[path] for path in others if generation_of(path) == generations[path]})


def _rename(names: Mapping[str, str], generations: Mapping[str, str]) -> bool:
    """Moves files; False where an object was not there any more as it was."""
    objects, others = _divided(names)
    if others:
        FileSystems.rename(others, [names[path] for path in others])
    return all(_in_parallel(lambda path: move_object(path, names[path], generations[path]), objects))


def _divided(paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """Those on Cloud Storage, and all others."""
    objects: list[str] = []
    others: list[str] = []
    for path in paths:
        (objects if path.startswith(GS) else others).append(path)
    return objects, others


def _in_parallel(ask: Callable[[str], _Answer], paths: Sequence[str]) -> list[_Answer]:
    """Asks storage about each file, of a few at once, since each answer takes its time; the first that fails ends it."""
    if len(paths) == 1:
        return [ask(paths[0])]
    with ThreadPoolExecutor(MAX_PARALLEL, "ask-storage") as pool:
        return list(pool.map(ask, paths))


def make_folder(folder: str) -> None:
    """Makes a local folder, which is durable then, with those above it that are missing; object storage has none."""
    if "://" not in folder and not os.path.isdir(folder or "."):
        parent = posixpath.dirname(folder.rstrip("/"))
        make_folder(parent)
        os.makedirs(folder, exist_ok=True)
        sync([parent])
