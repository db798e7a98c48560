"""Files, local or on object storage: atomic writes, renames and deletions.

A file survives a power cut once `sync` was called for it, and its name once `sync` was called for its folder. Callers sync a file
before they acknowledge, replace or delete anything that depends on it. Objects are durable once they are written.

A power cut may leave a file empty or cut off, and whoever can write to the results folder can leave anything there. So
`read_checked` checks the content against its type, and callers use a path in it only if the path lies in its own folder.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import posixpath
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, TypeVar

from pipeline.errors import OutputError
from pipeline.failures import ImageError, one_line
from pipeline.log_lines import console
from pipeline.storage.listing import MAX_PARALLEL
from pipeline.storage.store import ChangedError, FoundFile, retried
from pipeline.storage.stores import generation_of, look_up, store_of

UNFINISHED = ".staging-"  # prefix of all files and folders that readers must ignore; the dot hides them
# a missing file is synced under its new name; some file systems cannot sync folders, and some folders may not be read
_NOT_SYNCED = (errno.ENOENT, errno.EINVAL, errno.ENOTSUP, errno.EACCES)

_MARK_BYTES = 4096  # a mark is in the first bytes of a file
_MOST_STATE_BYTES = 256e6  # of a state file; whoever can write there may have put a larger one

_Answer = TypeVar("_Answer")


def create(path: str) -> BinaryIO:
    """Opens a new local file for bytes; makes a missing folder. The file is durable once `sync` was called."""
    make_folder(posixpath.dirname(path))
    return open(path, "wb")


@contextlib.contextmanager
def staging(folder: str) -> Iterator[str]:
    """A local folder for files that `move_files` moves into `folder` once they are whole: hidden in it if that is local, too."""
    if "://" in folder:
        with tempfile.TemporaryDirectory(prefix="detect-objects-") as made:
            yield made
        return
    make_folder(folder)
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder or ".", ignore_cleanup_errors=True) as made:
        yield made


def file_to_write(what: str, path: str, others: Iterable[str] = (), mark: bytes = b"") -> str:
    """The path of a file that a user names for writing, behind its links, which stay.

    Args:
      what: Its flag, for the message.
      path: Its name.
      others: Further files of the command, such as its inputs, which it must not replace; empty: none.
      mark: What stands in the beginning of a file that the command may replace; empty: in any.

    Raises:
      OutputError: Something else has the name, which a file would replace: a folder, a device, a pipe, one of `others`, a file
        without the mark, or that of this command's output.
    """
    behind = path if "://" in path else os.path.realpath(path)
    if behind in [each if "://" in each else os.path.realpath(each) for each in others if each] or _is_output(path):
        raise OutputError(f"{what} {path}: this command reads or writes that file already; choose another name")
    if "://" not in path and (path.endswith("/") or (os.path.lexists(behind) and not os.path.isfile(behind))):
        raise OutputError(f"{what} {path}: expected a file or a free name, found something else there; choose another name")
    if mark and is_of_others(behind, mark):
        raise OutputError(f"{what} {path}: is a file that this command did not write; choose another name")
    return behind


def _is_output(path: str) -> bool:
    """Whether the standard output or error of this process goes to a file, as to `/dev/stdout`: later lines would be lost."""
    with contextlib.suppress(OSError):  # there is no file, or a stream is closed
        return any(os.path.samestat(os.stat(path), os.fstat(stream)) for stream in (1, 2))
    return False


def is_of_others(path: str, mark: bytes) -> bool:
    """Whether a file has content, and lacks the mark of this program in its beginning."""
    content = read_beginning(path, _MARK_BYTES).strip(b"\0")  # a power cut may have left zeros
    return bool(content) and mark not in content


def add_file(path: str, content: bytes) -> bool:
    """Writes a whole new file atomically and durably; False if a file has its name, but for an object with the same content.

    Of two that write the same name to a disk at the same moment, the later one replaces the other's.
    """
    if "://" in path:
        store = store_of(path)
        try:
            retried(store.write)(path, content, "")
        except ChangedError:  # perhaps by an earlier try, whose answer was lost
            return read_file(path) == content
        return True
    if os.path.lexists(path):
        return False
    write_file(path, content)
    return True


def write_file(path: str, content: bytes, staging: str = "") -> None:
    """Writes a whole file atomically and durably, also beside other writers of the same file.

    Args:
      path: Its name; a missing folder is made.
      content: All of it.
      staging: Folder on the same disk for the temporary file that a kill leaves; default: beside the file. Objects need none.
    """
    write_files({path: content}, staging)


def write_files(contents: Mapping[str, bytes], staging: str = "") -> None:
    """Writes several files, each as `write_file` does, with one sync for all."""
    objects, others = _divided(contents)
    _in_parallel(lambda path: retried(store_of(path).write)(path, contents[path]), objects)
    staged: dict[str, str] = {}
    try:
        for path in others:
            # not derived from the file's name, which may have the greatest possible length
            temporary = posixpath.join(staging or posixpath.dirname(path), UNFINISHED + uuid.uuid4().hex[:12])
            staged[temporary] = path
            try:
                with create(temporary) as file:
                    file.write(contents[path])
            except OSError as err:  # of a write, which names no file
                err.filename = err.filename or path
                raise
        move_files(staged)
    except BaseException:
        for temporary in staged:
            with contextlib.suppress(OSError):
                os.remove(temporary)
        raise


def sync(paths: Iterable[str]) -> None:
    """Makes the content of local files, and the names in local folders, survive a power cut.

    Args:
      paths: Files and folders; missing ones and objects are skipped.

    Raises:
      OSError: The disk failed to store the content.
    """
    _in_parallel(_sync, [path for path in {*paths} if "://" not in path])


def _sync(path: str) -> None:
    try:
        opened = os.open(path or ".", os.O_RDONLY)
        try:
            os.fsync(opened)  # includes writes of other processes
        finally:
            os.close(opened)
    except OSError as err:
        if err.errno not in _NOT_SYNCED:
            raise


def folders_of(paths: Iterable[str]) -> set[str]:
    """The folders of files."""
    return {posixpath.dirname(path) for path in paths}


def read_file(path: str, most_bytes: float = math.inf) -> bytes:
    """All bytes of a file.

    Raises:
      FileNotFoundError: There is none.
      ValueError: It is larger than `most_bytes`.
    """
    if "://" not in path:
        with open(path, "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > most_bytes:
                raise ValueError(f"expected at most {most_bytes / 1e6:g} MB, got {size / 1e6:.0f} MB")
            return file.read()
    try:
        return retried(store_of(path).download)(FoundFile(path), most_bytes, lambda _size: None)[0]
    except ImageError as err:
        raise ValueError(str(err)) from err


def read_beginning(path: str, most_bytes: int) -> bytes:
    """The first bytes of a file, however large it is; none where there is no such file."""
    found = look_up(path)
    if not (found and found.size_bytes):
        return b""
    content: bytes = retried(store_of(path).read_range)(path, 0, min(found.size_bytes, most_bytes))
    return content


def delete_files(paths: Iterable[str]) -> None:
    """Deletes files by their exact names, objects in any order; a missing file is no error."""
    delete_generations(dict.fromkeys(paths, ""))


def delete_generations(generations: Mapping[str, str]) -> None:
    """Deletes files, as `delete_files` does, but those that have been replaced since they had this generation; empty: any."""
    objects, others = _divided(generations)
    _in_parallel(lambda path: _delete_object(path, generations[path]), objects)
    for path in others:
        if generations[path] in ("", generation_of(path)):
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)


def _delete_object(path: str, generation: str) -> None:
    with contextlib.suppress(FileNotFoundError, ChangedError):
        retried(store_of(path).delete)(path, generation)


def exists(path: str) -> bool:
    """Whether a file exists, or a local folder."""
    return bool(generation_of(path)) if "://" in path else os.path.exists(path)


def generations_of(paths: Iterable[str]) -> dict[str, str]:
    """Those of some files that exist, each with its generation."""
    paths = list(paths)
    return {path: generation for path, generation in zip(paths, _in_parallel(generation_of, paths), strict=True) if generation}


def move_files(names: Mapping[str, str]) -> None:
    """Renames local files, each within its disk, or moves them to object storage; they replace files that have the new names.

    The files are durable before they replace anything, and their new names are durable when this returns.

    Args:
      names: Path -> new path, in this order.

    Raises:
      FileNotFoundError: A file is not there.
    """
    objects, others = ([path for path, new in names.items() if ("://" in new) is there] for there in (True, False))
    for folder in folders_of(names[path] for path in others):
        make_folder(folder)
    sync(others)
    for path in others:
        os.replace(path, names[path])
    sync(folders_of(names[path] for path in others))
    for path in objects:
        retried(_upload)(path, names[path])
        os.remove(path)


def _upload(path: str, new: str) -> None:
    with open(path, "rb") as file:
        store_of(new).write(new, file)


def _divided(paths: Collection[str]) -> tuple[list[str], list[str]]:
    """The paths of objects, and all others."""
    return [path for path in paths if "://" in path], [path for path in paths if "://" not in path]


def _in_parallel(call: Callable[[str], _Answer], paths: Sequence[str]) -> list[_Answer]:
    """Calls `call` for each path, a few in parallel, since each call waits for storage; the first error ends it."""
    if len(paths) == 1:
        return [call(paths[0])]
    with ThreadPoolExecutor(MAX_PARALLEL, "storage-calls") as pool:
        return list(pool.map(call, paths))


def make_folder(folder: str) -> None:
    """Makes a local folder and the missing ones above it, durably; object storage has no folders."""
    if "://" not in folder and not os.path.isdir(folder or "."):
        parent = posixpath.dirname(folder.rstrip("/"))
        make_folder(parent)
        os.makedirs(folder, exist_ok=True)
        sync([parent])


def read_checked(path: str, parse: Callable[[bytes], Any]) -> Any:
    """What `parse` makes of a file; None where there is no such file, or `parse` raises a `ValueError`.

    Args:
      path: The file.
      parse: Parses its content.
    """
    if not is_own_file(path):
        if os.path.lexists(path):
            warn_unreadable(path, "expected a file")
        return None
    try:
        return parse(read_file(path, _MOST_STATE_BYTES))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, PermissionError) as err:
        warn_unreadable(path, one_line(err))
        return None


@functools.lru_cache(maxsize=1000)  # once for each file, although a run reads some of them often
def warn_unreadable(path: str, why: str) -> None:
    """Logs that a state file is ignored."""
    shown = path.encode("utf-8", "backslashreplace").decode()
    console.warning("%s cannot be read and is ignored: %s", shown, why)


def is_own_file(path: str) -> bool:
    """Whether a local path is a regular file: no link, no folder, no pipe. Always true of objects."""
    return "://" in path or (os.path.isfile(path) and not os.path.islink(path))
