"""One image's bytes and generation, from a local file, Cloud Storage or whatever else Beam can open."""

from __future__ import annotations

import functools
import io
import os
import stat
import threading
from collections.abc import Callable
from typing import Any

from pipeline.failures import ImageError
from pipeline.records import ImageRef

_RETRY_SECONDS = 60.0


Reserve = Callable[[int], None]


def take_freely(_size_bytes: int) -> None:
    """Room for any number of bytes."""


def fetch(ref: ImageRef, max_bytes: int, reserve: Reserve = take_freely) -> tuple[bytes, str]:
    """Reads an image: (bytes, generation).

    The generation is the object's on Cloud Storage, and size and modification time of a local file.

    Args:
      ref: Which image.
      max_bytes: A larger one is refused.
      reserve: Is told how many bytes will be taken before they are; what it raises ends the reading.

    Raises:
      ImageError: It is gone, closed to us, too large or unreadable.
    """
    try:
        if ref.uri.startswith("gs://"):
            return _fetch_object(ref, max_bytes, reserve)
        if "://" in ref.uri:
            return _fetch_through_beam(ref, max_bytes, reserve), ref.generation
        return _fetch_file(ref.uri, max_bytes, reserve)
    except FileNotFoundError as err:
        raise ImageError("read", "not_found", f"{ref.uri} does not exist") from err
    except IsADirectoryError as err:
        raise ImageError("read", "not_a_file", f"{ref.uri} is a folder") from err
    except PermissionError as err:
        raise ImageError("read", "permission_denied", f"{ref.uri} may not be read by this user") from err
    except (OSError, ValueError) as err:
        raise ImageError("read", "unreadable", f"{ref.uri} cannot be read: {' '.join(str(err).split())[:300]}") from err


def _fetch_file(path: str, max_bytes: int, reserve: Reserve) -> tuple[bytes, str]:
    with open(path, "rb", opener=_open_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ImageError("read", "not_a_file", f"{path} is no regular file")
        _check_size(path, status.st_size, max_bytes)
        reserve(status.st_size)
        return file.read(status.st_size), f"{status.st_size}-{status.st_mtime_ns}"


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO must not hang the job


def _fetch_object(ref: ImageRef, max_bytes: int, reserve: Reserve) -> tuple[bytes, str]:
    from google.api_core.exceptions import Forbidden, GoogleAPICallError, NotFound, Unauthorized
    from google.cloud.storage.retry import DEFAULT_RETRY

    retry = DEFAULT_RETRY.with_timeout(_RETRY_SECONDS)
    bucket, _, name = ref.uri[len("gs://") :].partition("/")
    blob = (
        _storage_client(threading.get_ident())
        .bucket(bucket)
        .blob(name, generation=int(ref.generation) if ref.generation else None)
    )
    size = ref.size_bytes
    try:
        while True:
            if not size:  # not listed, or not that large any more: look before taking memory
                blob.reload(retry=retry)
                size = blob.size or 0
            _check_size(ref.uri, size, max_bytes)
            reserve(size)
            content = _AtMost(size)
            try:
                blob.download_to_file(content, raw_download=True, retry=retry)
                break
            except _LargerError:
                size = 0
        if blob.generation is None:  # Cloud Storage sends it along; not everything that speaks its protocol does
            blob.reload(retry=retry)
    except NotFound as err:
        raise ImageError("read", "not_found", f"{ref.uri} does not exist") from err
    except (Forbidden, Unauthorized) as err:
        raise ImageError("read", "permission_denied", f"{ref.uri} may not be read with these credentials") from err
    except GoogleAPICallError as err:
        raise ImageError("read", "unreadable", f"{ref.uri} cannot be read: {err.message}") from err
    return content.getvalue(), str(blob.generation or ref.generation)


@functools.lru_cache(maxsize=256)
def _storage_client(thread: int) -> Any:
    """Beam's own Cloud Storage client, one for each reading thread, so that each keeps its connection."""
    from apache_beam.io.gcp.gcsio import GcsIO

    return GcsIO().client


class _LargerError(Exception):
    """An object has more bytes than it had when it was looked at."""


class _AtMost(io.BytesIO):
    """Takes so many bytes and no more."""

    def __init__(self, most: int):
        super().__init__()
        self._most = most

    def write(self, content: Any) -> int:
        if self.tell() + len(content) > self._most:
            raise _LargerError
        return super().write(content)


def _fetch_through_beam(ref: ImageRef, max_bytes: int, reserve: Reserve) -> bytes:
    from apache_beam.io.filesystems import FileSystems

    size = ref.size_bytes or FileSystems.get_filesystem(ref.uri).size(ref.uri)
    _check_size(ref.uri, size, max_bytes)
    reserve(size)
    with FileSystems.open(ref.uri, compression_type="uncompressed") as file:
        content: bytes = file.read(size + 1)
    if len(content) > size:
        raise ImageError("read", "unreadable", f"{ref.uri} has more than the {size} bytes that it had when it was looked at")
    return content


def _check_size(uri: str, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise ImageError(
            "read",
            "too_large_file",
            f"{uri} has {size / 1e6:.1f} MB; expected at most {max_bytes / 1e6:g} MB (max_file_mb sets the limit)",
        )
