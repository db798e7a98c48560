"""The stores, by the schemes of their addresses, and that of files on a local disk."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from pipeline.failures import ImageError
from pipeline.storage.azure import ABFS, AzureStore
from pipeline.storage.cloud import GS, GoogleStore
from pipeline.storage.name_ranges import NameRange
from pipeline.storage.s3 import S3, S3Store
from pipeline.storage.store import EVERY_NAME, RETRY_SECONDS, FoundFile, Reserve, Store, check_size, retried
from pipeline.storage.web import WEB, WebStore

LISTED = (GS, S3, ABFS)  # object storage


class LocalStore(Store):
    """The files of this machine; a file's generation is its size and modification time."""

    def look_up(self, path: str, generation: str = "") -> FoundFile:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(f"{path} is a folder")
        return _found(path, status)

    def download(self, file: FoundFile, most_bytes: float, reserve: Reserve) -> tuple[bytes, str]:
        with self.open(file.path) as opened:
            found = _found(file.path, os.fstat(opened.fileno()))
            check_size(found, most_bytes, reserve)
            return opened.read(found.size_bytes), found.generation

    def read_range(self, path: str, start: int, end: int, generation: str = "") -> bytes:
        with self.open(path) as file:
            file.seek(start)
            return file.read(end - start)

    def list_folder(
        self, folder: str, beginning: str, one_folder: bool, names: NameRange = EVERY_NAME, at_once: int | None = None
    ) -> Iterator[FoundFile | str]:
        """One folder, whose files are not looked at; also itself, with its fault, if the system does not list (all of) it."""
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    is_folder = os.path.isdir(entry) if entry.is_symlink() else entry.is_dir()
                    yield entry.name if is_folder else FoundFile(folder + entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as err:
            yield FoundFile(folder.rstrip("/") or folder, fault=err)

    @contextlib.contextmanager
    def open(self, path: str, generation: str = "", retry_seconds: float = RETRY_SECONDS) -> Iterator[BinaryIO]:
        """Opens a regular file.

        Raises:
          ImageError: It is a pipe, or a device.
        """
        with open(path, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ImageError("read", "not_a_file", f"{path} is no regular file", _found(path, status).generation)
            yield file


def _found(path: str, status: os.stat_result) -> FoundFile:
    return FoundFile(path, status.st_size, f"{status.st_size}-{status.st_mtime_ns}")


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO must not hang the job


_LOCAL = LocalStore()
_STORES: dict[str, Store] = {GS: GoogleStore(), S3: S3Store(), ABFS: AzureStore(), **dict.fromkeys(WEB, WebStore())}


def store_of(path: str) -> Store:
    """The store of a file.

    Raises:
      ValueError: There is none for its scheme.
    """
    if "://" not in path:
        return _LOCAL
    scheme = path[: path.index("://") + 3]
    if scheme not in _STORES:
        raise ValueError(
            "expected a file on this machine, gs://bucket/name, s3://bucket/name, abfs://container/name or a web address; "
            "copy the file to one of these"
        )
    return _STORES[scheme]


def look_up(path: str) -> FoundFile | None:
    """A file by its exact name; None if there is none. A local one that may not be looked at is for its reader to complain of."""
    if "://" not in path:
        try:
            return _LOCAL.look_up(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError:
            return FoundFile(path)
    with contextlib.suppress(FileNotFoundError):
        return retried(store_of(path).look_up)(path)
    return None


def generation_of(path: str) -> str:
    """The generation of a file or object, as in a listing; empty if it is missing, or has none."""
    found = look_up(path)
    return found.generation if found else ""
