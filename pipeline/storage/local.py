"""Files on a local disk."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from pipeline.failures import ImageError
from pipeline.storage.store import RETRY_SECONDS, FoundFile, Reserve, Store, check_size


class LocalStore(Store):
    """The files of this machine; a file's generation is its size and modification time."""

    def look_up(self, path: str, generation: str = "") -> FoundFile:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(f"{path} is a folder")
        return found_file(path, status)

    def download(self, file: FoundFile, most_bytes: float, reserve: Reserve) -> tuple[bytes, str]:
        with self.open(file.path) as opened:
            found = found_file(file.path, os.fstat(opened.fileno()))
            check_size(found.size_bytes, most_bytes, reserve, found.generation)
            return opened.read(found.size_bytes), found.generation

    def read_range(self, path: str, start: int, end: int, generation: str = "") -> bytes:
        with self.open(path) as file:
            file.seek(start)
            return file.read(end - start)

    @contextlib.contextmanager
    def open(self, path: str, generation: str = "", retry_seconds: float = RETRY_SECONDS) -> Iterator[BinaryIO]:
        """Opens a regular file.

        Raises:
          ImageError: It is a pipe, or a device.
        """
        with open(path, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ImageError("read", "not_a_file", f"{path} is no regular file", found_file(path, status).generation)
            yield file


def found_file(path: str, status: os.stat_result) -> FoundFile:
    """A local file by its status."""
    return FoundFile(path, status.st_size, f"{status.st_size}-{status.st_mtime_ns}")


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO must not hang the job
