"""Reads files from storage, and names what is wrong where storage fails. Imports neither Beam nor TensorFlow."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

from msgspec.structs import replace

from pipeline.errors import UserError
from pipeline.failures import Failure, ImageError
from pipeline.records import EncodedImage, ImageRef
from pipeline.storage.store import CredentialsError, FoundFile, Reserve, StoreError, check_size, is_transient_error, retried
from pipeline.storage.stores import store_of
from pipeline.storage.web import is_web, without_query

RETRY_SECONDS = 60.0
_GZIP = b"\x1f\x8b\x08"


def fetch(
    ref: ImageRef,
    max_bytes: int,
    reserve: Reserve = lambda _size_bytes: None,
    retry_seconds: float = RETRY_SECONDS,
    on_failure: Callable[[Exception], None] | None = None,
) -> EncodedImage | Failure:
    """Reads an image, or says why it is missing, forbidden, too large or unreadable.

    Its generation is the object's on Cloud Storage, and size and modification time of a local file.

    Args:
      ref: Which image.
      max_bytes: A larger one is refused.
      reserve: Called with the number of bytes before memory is taken; its exceptions end the read.
      retry_seconds: How long transient failures are retried.
      on_failure: Called with each transient failure; its exceptions end the read.
    """
    received_at, started = time.time(), time.monotonic()
    wanted = FoundFile(ref.location, ref.size_bytes, ref.generation)
    try:
        with storage_failures(ref.location):
            content, generation = retried(store_of(ref.location).download, retry_seconds, on_failure)(wanted, max_bytes, reserve)
            content = _as_uploaded(ref.uri, content, generation, max_bytes, reserve)
    except ImageError as err:
        return err.failure
    return EncodedImage(replace(ref, generation=generation), content, time.monotonic() - started, received_at)


def _as_uploaded(uri: str, content: bytes, generation: str, max_bytes: int, reserve: Reserve) -> bytes:
    """An image that is stored gzipped, as objects with `Content-Encoding: gzip` are, as it was before; no image begins so.

    Raises:
      ImageError: It would be larger than `max_bytes`.
    """
    if not content.startswith(_GZIP):
        return content
    size = int.from_bytes(content[-4:], "little")  # if the end is there
    most = max(1, min(size, max_bytes))
    reserve(len(content) + most)
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    with contextlib.suppress(zlib.error):
        unpacked = unpacker.decompress(content, most)
        if unpacker.eof:
            return unpacked
        if len(unpacked) == max_bytes:
            check_size(FoundFile(uri, size, generation), max_bytes)
    return content  # its decoder says what it is


@contextlib.contextmanager
def open_file(uri: str, generation: str = "") -> Iterator[BinaryIO]:
    """Opens a file, or an object of this generation, for reading, without decompression.

    Raises:
      ImageError: See `storage_failures`; also while the file is read.
    """
    with storage_failures(uri), store_of(uri).open(uri, generation, RETRY_SECONDS) as file:
        yield file


@contextlib.contextmanager
def storage_failures(uri: str) -> Iterator[None]:
    """Maps all exceptions of storage in its block to an `ImageError` that says what is wrong with the file.

    An error that is not the file's fault passes: this process is short of memory.

    Raises:
      ImageError: The file is missing, forbidden, unreadable, or not to be read now (`storage_unavailable`).
    """
    try:
        yield
    except (ImageError, UserError, MemoryError):
        raise
    except Exception as err:
        raise ImageError("read", *_reason(uri, err)) from err


def failure_of(uri: str, err: Exception) -> Failure:
    """The failure of a file or folder that an error of storage means; see `storage_failures`."""
    return Failure("read", *_reason(uri, err))


def _reason(uri: str, err: Exception) -> tuple[str, str]:
    """The reason of a failure, and its message."""
    query, uri = (uri.partition("?")[2], without_query(uri)) if is_web(uri) else ("", uri)
    for kind, reason, what in (
        (FileNotFoundError, "not_found", "does not exist"),
        (IsADirectoryError, "not_a_file", "is a folder"),
        (PermissionError, "permission_denied", f"may not be read {'with these credentials' if '://' in uri else 'by this user'}"),
    ):
        if isinstance(err, kind):
            return reason, f"{uri} {what}"
    message = " ".join((str(err).replace(query, "***") if query else str(err)).split())[:300]
    if isinstance(err, CredentialsError):
        return "storage_unavailable", f"{uri} cannot be read for want of credentials: {message}"
    if is_transient_error(err):
        return "storage_unavailable", f"{uri} cannot be read now, storage does not answer as it should: {message}"
    name = "" if isinstance(err, (OSError, ValueError, StoreError)) and message else f"{type(err).__name__}: "
    return "unreadable", f"{uri} cannot be read: {name}{message}"
