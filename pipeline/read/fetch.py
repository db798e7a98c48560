"""Fetches one image's bytes and generation from storage, and maps storage's failures to transient and permanent ones."""

from __future__ import annotations

import contextlib
import errno
import http.client
import io
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.errors import UserError
from pipeline.failures import ImageError
from pipeline.prefetch import NoRoomError
from pipeline.records import ImageRef
from pipeline.storage.cloud import blob_of, storage_client
from pipeline.storage.etag_stores import etag_store
from pipeline.storage.web import TooLargeAnswerError, download, is_web, without_query
from pipeline.storage.web import look_up as look_up_web

RETRY_SECONDS = 60.0
_LONGEST_WAIT_SECONDS = 2.0  # between two tries, and so after the job was stopped
_CHUNK_BYTES = 8 << 20  # of what is read piece by piece; Google's reader would take 40 MB
_PASSING_ERRNOS = {
    *(errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM),  # this machine is short of something
    *(errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN),
}  # EIO is not among them: a bad sector does not mend

Reserve = Callable[[int], None]


class StorageUnavailableError(ImageError):
    """A transient failure of storage or credentials: nothing is wrong with the image, and a later read may succeed."""

    def __init__(self, message: str):
        super().__init__("read", "storage_unavailable", message)


def take_freely(_size_bytes: int) -> None:
    """Reserves without a limit."""


def fetch(
    ref: ImageRef,
    max_bytes: int,
    reserve: Reserve = take_freely,
    retry_seconds: float = RETRY_SECONDS,
    on_failure: Callable[[Exception], None] | None = None,
) -> tuple[bytes, str]:
    """Reads an image: (bytes, generation).

    The generation is the object's on Cloud Storage, and size and modification time of a local file.

    Args:
      ref: Which image.
      max_bytes: A larger one is refused.
      reserve: Called with the number of bytes before memory is taken; its exceptions end the read.
      retry_seconds: How long transient failures are retried.
      on_failure: Called with each transient failure; its exceptions end the read.

    Raises:
      StorageUnavailableError: Storage failed for `retry_seconds`.
      ImageError: The image is missing, forbidden, too large or unreadable.
    """
    with storage_failures(ref.location):
        try:
            return _fetch_once(ref, max_bytes, reserve)
        except Exception as err:  # `Retry` costs 20 microseconds, which all images but those of an outage can do without
            if not is_transient_error(err):
                raise
            if on_failure:
                on_failure(err)
            if retry_seconds <= 0:
                raise
        read: tuple[bytes, str] = _retry(retry_seconds, on_failure)(_fetch_once)(ref, max_bytes, reserve)
        return read


def look_up(ref: ImageRef, retry_seconds: float = RETRY_SECONDS) -> str:
    """The current generation, as `fetch` returns it; one request on Cloud Storage, and no bytes.

    Raises:
      ImageError: It cannot be looked up.
    """
    with storage_failures(ref.location):
        if ref.uri.startswith("gs://"):
            with storage_client() as client:
                blob = blob_of(client, ref.uri, ref.generation)
                _retry(retry_seconds)(blob.reload)(retry=None)
                return str(blob.generation or ref.generation)
        store = etag_store(ref.uri)
        if is_web(ref.uri) or store:
            return _retry(retry_seconds)(store.look_up if store else look_up_web)(ref.location)[2] or ref.generation
        return ref.generation if "://" in ref.uri else _generation(os.stat(ref.uri))


def _retry(seconds: float, on_failure: Callable[[Exception], None] | None = None) -> Any:
    from google.api_core.retry import Retry  # imports much, which a local file does not need

    return Retry(is_transient_error, initial=0.2, maximum=_LONGEST_WAIT_SECONDS, timeout=seconds, on_error=on_failure)


@contextlib.contextmanager
def open_file(uri: str, retry_seconds: float = RETRY_SECONDS, generation: str = "") -> Iterator[Any]:
    """Opens a file, or an object of this generation, for reading, without decompression; use it within `storage_failures`."""
    with contextlib.ExitStack() as opened:
        if uri.startswith("gs://"):
            from google.cloud.storage.retry import DEFAULT_RETRY

            again = DEFAULT_RETRY.with_timeout(retry_seconds)
            blob = blob_of(opened.enter_context(storage_client()), uri, generation)
            blob.reload(retry=again)  # reading fails if the object is replaced meanwhile
            same = {"if_generation_match": blob.generation}
            file = opened.enter_context(blob.open("rb", chunk_size=_CHUNK_BYTES, raw_download=True, retry=again, **same))
        elif store := etag_store(uri):
            file = opened.enter_context(store.open_object(uri))
        elif is_web(uri):
            raise ImageError("read", "unreadable", f"{uri}: only images are read from web addresses; copy the file first")
        elif "://" in uri:
            from apache_beam.io.filesystems import FileSystems

            file = opened.enter_context(FileSystems.open(uri, compression_type="uncompressed"))
        else:
            file = opened.enter_context(open(uri, "rb", opener=_open_without_waiting))
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ImageError("read", "not_a_file", f"{uri} is no regular file", _generation(status))
        yield file


@contextlib.contextmanager
def storage_failures(uri: str) -> Iterator[None]:
    """Maps all exceptions of storage in its block to an `ImageError` that says what is wrong with the file.

    Raises:
      StorageUnavailableError: A transient failure; the same read may succeed later.
      ImageError: The file is missing, forbidden or unreadable.
    """
    try:
        yield
    except (ImageError, NoRoomError, UserError):
        raise
    except Exception as err:
        raise _image_error(uri, err) from err


def is_transient_error(err: BaseException) -> bool:
    """Whether a failure of storage is transient, and worth a retry."""
    if isinstance(err, OSError) and err.errno in _PASSING_ERRNOS:
        return True
    if isinstance(err, (ConnectionError, TimeoutError, http.client.HTTPException)):
        return True
    import requests
    import urllib3
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.cloud.storage.exceptions import DataCorruption

    if isinstance(err, GoogleAuthError):
        return isinstance(err, TransportError) or bool(err.retryable)
    of_google = (exceptions.TooManyRequests, exceptions.ServerError, exceptions.RetryError, DataCorruption)
    of_http = (
        *(requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError),
        *(requests.exceptions.ChunkedEncodingError, requests.exceptions.JSONDecodeError),
    )
    return isinstance(err, (*of_google, *of_http)) or getattr(err, "code", None) == http.client.REQUEST_TIMEOUT


def _image_error(uri: str, err: Exception) -> ImageError:
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError

    query = uri.partition("?")[2] if is_web(uri) else ""
    uri = without_query(uri) if query else uri
    for kinds, reason, what in (
        ((FileNotFoundError, exceptions.NotFound), "not_found", "does not exist"),
        ((IsADirectoryError,), "not_a_file", "is a folder"),
        ((PermissionError,), "permission_denied", "may not be read by this user"),
        ((exceptions.Forbidden, exceptions.Unauthorized), "permission_denied", "may not be read with these credentials"),
    ):
        if isinstance(err, kinds):
            return ImageError("read", reason, f"{uri} {what}")
    cause = getattr(err, "cause", None) or err  # `RetryError` has the failure of its last try
    said = str(getattr(cause, "message", None) or cause)
    said = " ".join((said.replace(query, "***") if query else said).split())[:300]
    if isinstance(cause, GoogleAuthError):
        return StorageUnavailableError(f"{uri} cannot be read for want of credentials: {said}")
    if is_transient_error(err):
        return StorageUnavailableError(f"{uri} cannot be read now, storage does not answer as it should: {said}")
    kind = "" if isinstance(cause, (OSError, ValueError, exceptions.GoogleAPIError)) and said else f"{type(cause).__name__}: "
    scheme, is_uri, _ = uri.partition("://")
    if is_uri and scheme not in ("gs", "s3", "abfs", "file", "http", "https"):
        kind = f"{scheme}:// is read only where Beam is set up for it, so copy the image first; Beam says: {kind}"
    return ImageError("read", "unreadable", f"{uri} cannot be read: {kind}{said}")


def _fetch_once(ref: ImageRef, max_bytes: int, reserve: Reserve) -> tuple[bytes, str]:
    if ref.uri.startswith("gs://"):
        return _fetch_object(ref, max_bytes, reserve)
    if store := etag_store(ref.uri):
        return _fetch_with_etag(store, ref.uri, max_bytes, reserve)
    if is_web(ref.uri):
        return _fetch_web(ref.location, max_bytes, reserve)
    if "://" in ref.uri:
        return _fetch_through_beam(ref, max_bytes, reserve), ref.generation
    return _fetch_file(ref.uri, max_bytes, reserve)


def _fetch_file(path: str, max_bytes: int, reserve: Reserve) -> tuple[bytes, str]:
    with open_file(path) as file:
        status = os.fstat(file.fileno())
        _check_size(path, status.st_size, max_bytes, _generation(status))
        reserve(status.st_size)
        return file.read(status.st_size), _generation(status)


def _generation(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}"


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO must not hang the job


def _fetch_object(ref: ImageRef, max_bytes: int, reserve: Reserve) -> tuple[bytes, str]:
    with storage_client() as client:
        return _download(blob_of(client, ref.uri, ref.generation), ref, max_bytes, reserve)


def _download(blob: Any, ref: ImageRef, max_bytes: int, reserve: Reserve) -> tuple[bytes, str]:
    size = ref.size_bytes
    while True:
        if (
            not 0 < size <= max_bytes
        ):  # not listed, or not that small any more: look before taking memory; which version is refused
            blob.reload(retry=None)
            size = blob.size or 0
        _check_size(ref.uri, size, max_bytes, str(blob.generation or ref.generation))
        reserve(size)
        content = _AtMost(size)
        try:
            blob.download_to_file(content, raw_download=True, retry=None)
            break
        except _LargerError:
            size = 0
    if blob.generation is None:  # Cloud Storage sends it along; not everything that speaks its protocol does
        blob.reload(retry=None)
    return content.getvalue(), str(blob.generation or ref.generation)


class _LargerError(Exception):
    """An object has grown since its size was read."""


class _AtMost(io.BytesIO):
    """A buffer for a limited number of bytes."""

    def __init__(self, most: int):
        super().__init__()
        self._most = most

    def write(self, content: Any) -> int:
        if self.tell() + len(content) > self._most:
            raise _LargerError
        return super().write(content)


def _fetch_with_etag(store: Any, uri: str, max_bytes: int, reserve: Reserve) -> tuple[bytes, str]:
    def check(size: int) -> None:
        _check_size(uri, size, max_bytes)
        reserve(size)

    content, etag = store.download(uri, check)
    return content, etag


def _fetch_web(uri: str, max_bytes: int, reserve: Reserve) -> tuple[bytes, str]:
    try:
        return download(uri, max_bytes, reserve)
    except TooLargeAnswerError as err:
        _check_size(without_query(uri), err.args[0], max_bytes)
        raise


def _fetch_through_beam(ref: ImageRef, max_bytes: int, reserve: Reserve) -> bytes:
    from apache_beam.io.filesystems import FileSystems

    size = ref.size_bytes or FileSystems.get_filesystem(ref.uri).size(ref.uri)
    _check_size(ref.uri, size, max_bytes)
    reserve(size)
    with open_file(ref.uri) as file:
        content: bytes = file.read(size + 1)
    if len(content) > size:
        raise ImageError("read", "unreadable", f"{ref.uri} has more than the {size} bytes that it had when it was looked at")
    return content


def _check_size(uri: str, size: int, max_bytes: int, generation: str = "") -> None:
    if size > max_bytes:
        raise ImageError(
            "read",
            "too_large_file",
            f"{uri} has {size / 1e6:.1f} MB; expected at most {max_bytes / 1e6:g} MB (max_file_mb sets the limit)",
            generation,
        )
