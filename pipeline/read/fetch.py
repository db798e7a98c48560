"""One image's bytes and generation, from a local file, Cloud Storage or whatever else Beam can open."""

from __future__ import annotations

import functools
import os
import stat
import threading
from typing import Any

from pipeline.failures import ImageError
from pipeline.records import ImageRef

_RETRY_SECONDS = 60.0


def fetch(ref: ImageRef, max_bytes: int) -> tuple[bytes, str]:
    """Reads an image: (bytes, generation).

    The generation is the object's on Cloud Storage, and size and modification time of a local file.

    Raises:
      ImageError: It is gone, closed to us, too large or unreadable.
    """
    try:
        if ref.uri.startswith("gs://"):
            return _fetch_object(ref, max_bytes)
        if "://" in ref.uri:
            return _fetch_through_beam(ref, max_bytes), ref.generation
        return _fetch_file(ref.uri, max_bytes)
    except FileNotFoundError as err:
        raise ImageError("read", "not_found", f"{ref.uri} does not exist") from err
    except IsADirectoryError as err:
        raise ImageError("read", "not_a_file", f"{ref.uri} is a folder") from err
    except PermissionError as err:
        raise ImageError("read", "permission_denied", f"{ref.uri} may not be read by this user") from err
    except (OSError, ValueError) as err:
        raise ImageError("read", "unreadable", f"{ref.uri} cannot be read: {' '.join(str(err).split())[:300]}") from err


def _fetch_file(path: str, max_bytes: int) -> tuple[bytes, str]:
    with open(path, "rb", opener=_open_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ImageError("read", "not_a_file", f"{path} is no regular file")
        _check_size(path, status.st_size, max_bytes)
        return file.read(), f"{status.st_size}-{status.st_mtime_ns}"


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO must not hang the job


def _fetch_object(ref: ImageRef, max_bytes: int) -> tuple[bytes, str]:
    from google.api_core.exceptions import Forbidden, GoogleAPICallError, NotFound, Unauthorized
    from google.cloud.storage.retry import DEFAULT_RETRY

    _check_size(ref.uri, ref.size_bytes, max_bytes)
    bucket, _, name = ref.uri[len("gs://") :].partition("/")
    blob = (
        _storage_client(threading.get_ident())
        .bucket(bucket)
        .blob(name, generation=int(ref.generation) if ref.generation else None)
    )
    try:
        if not ref.size_bytes:  # not listed: look before taking memory
            blob.reload(retry=DEFAULT_RETRY.with_timeout(_RETRY_SECONDS))
            _check_size(ref.uri, blob.size or 0, max_bytes)
        content = blob.download_as_bytes(raw_download=True, retry=DEFAULT_RETRY.with_timeout(_RETRY_SECONDS))
        if blob.generation is None:  # Cloud Storage sends it along; not everything that speaks its protocol does
            blob.reload(retry=DEFAULT_RETRY.with_timeout(_RETRY_SECONDS))
    except NotFound as err:
        raise ImageError("read", "not_found", f"{ref.uri} does not exist") from err
    except (Forbidden, Unauthorized) as err:
        raise ImageError("read", "permission_denied", f"{ref.uri} may not be read with these credentials") from err
    except GoogleAPICallError as err:
        raise ImageError("read", "unreadable", f"{ref.uri} cannot be read: {err.message}") from err
    return content, str(blob.generation or ref.generation)


@functools.lru_cache(maxsize=256)
def _storage_client(thread: int) -> Any:
    """Beam's own Cloud Storage client, one for each reading thread, so that each keeps its connection."""
    from apache_beam.io.gcp.gcsio import GcsIO

    return GcsIO().client


def _fetch_through_beam(ref: ImageRef, max_bytes: int) -> bytes:
    from apache_beam.io.filesystems import FileSystems

    with FileSystems.open(ref.uri, compression_type="uncompressed") as file:
        content: bytes = file.read(max_bytes + 1)
    _check_size(ref.uri, len(content), max_bytes)
    return content


def _check_size(uri: str, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise ImageError(
            "read",
            "too_large_file",
            f"{uri} has {size / 1e6:.1f} MB; expected at most {max_bytes / 1e6:g} MB (max_file_mb sets the limit)",
        )
