"""The interface of a store of files. Each call is one attempt; `retried` repeats one while its failure may pass.

A store raises `FileNotFoundError` or `NotFound` of `google.api_core` for what is not there, and other errors of these two kinds.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import io
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple, TypeVar

from pipeline.errors import AwayError, UserError
from pipeline.failures import ImageError
from pipeline.storage.name_ranges import NameRange

RETRY_SECONDS = 120.0  # as Google's clients
_LONGEST_WAIT_SECONDS = 2.0  # between two tries, and so after the job was stopped
_BUFFER_BYTES = 8 << 20  # of an open object; Google's reader would take 40 MB
_PASSING_ERRNOS = {
    *(errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM),  # this machine is short of something
    *(errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN),
}  # EIO is not among them: a bad sector stays bad

EVERY_NAME = NameRange()

Reserve = Callable[[int], None]
_Answer = TypeVar("_Answer")


class FoundFile(NamedTuple):
    """A file or object.

    Attributes:
      path: Its path or URI.
      size_bytes: Its size; 0 if unknown.
      generation: The object's generation or ETag, or size and modification time of a local file; empty if unknown.
    """

    path: str
    size_bytes: int = 0
    generation: str = ""


class Store:
    """A store: the files of one machine, or all that a scheme names.

    Attributes:
      lists_ranges: Whether it lists a range of names without those before it.
    """

    lists_ranges = False

    def look_up(self, path: str, generation: str = "") -> FoundFile:
        """Size and generation of a file, where the store can, of the version with the given generation."""
        raise NotImplementedError

    def download(self, file: FoundFile, most_bytes: float, reserve: Reserve) -> tuple[bytes, str]:
        """The content of a file, and its generation.

        Args:
          file: The file; its size and generation may be unknown.
          most_bytes: A larger one is refused.
          reserve: Called with the number of bytes before memory is taken; its exceptions end the download.

        Raises:
          ImageError: The file is larger.
        """
        raise NotImplementedError

    def read_range(self, path: str, start: int, end: int, generation: str = "") -> bytes:
        """The bytes `[start, end)` of a file, if it has such bytes, only of the given generation if there is one."""
        raise NotImplementedError

    def list_folder(
        self, folder: str, beginning: str, one_folder: bool, names: NameRange = EVERY_NAME, at_once: int | None = None
    ) -> Iterator[FoundFile | str]:
        """The objects whose names begin with `folder` and `beginning`, and the names of subfolders if only one is listed.

        Args:
          folder: Ends with a slash.
          beginning: Of names in it.
          one_folder: Whether to list only what lies directly in it.
          names: Others need not be listed, where the store `lists_ranges`.
          at_once: Names that one request asks for, where it does; None: as many as the store gives.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def open(self, path: str, generation: str = "", retry_seconds: float = RETRY_SECONDS) -> Iterator[BinaryIO]:
        """Opens a file; reading fails if it is replaced meanwhile."""
        found = retried(self.look_up, retry_seconds)(path, generation)
        with open_object(found, retried(self.read_range, retry_seconds)) as file:
            yield file


def check_size(file: FoundFile, most_bytes: float, reserve: Reserve = lambda _size_bytes: None) -> None:
    """Reserves the bytes of a file.

    Raises:
      ImageError: It is too large.
    """
    if file.size_bytes > most_bytes:
        message = f"{file.path} has {file.size_bytes / 1e6:.1f} MB; expected at most {most_bytes / 1e6:g} MB"
        raise ImageError("read", "too_large_file", f"{message} (max_file_mb sets the limit)", file.generation)
    reserve(file.size_bytes)


def open_object(
    found: FoundFile, read_range: Callable[[str, int, int, str], bytes], buffer_bytes: int = _BUFFER_BYTES
) -> io.BufferedReader:
    """An object as a file that reads ahead; see `Store.read_range`."""
    return io.BufferedReader(_ObjectFile(found, read_range), buffer_bytes)


class _ObjectFile(io.RawIOBase):
    def __init__(self, found: FoundFile, read_range: Callable[[str, int, int, str], bytes]) -> None:
        self._path, self._size, self._generation = found
        self._read_range, self._at = read_range, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._size, self._at + len(buffer))
        content = self._read_range(self._path, self._at, end, self._generation) if end > self._at else b""
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def retried(
    call: Callable[..., _Answer], seconds: float = RETRY_SECONDS, on_failure: Callable[[Exception], None] | None = None
) -> Callable[..., _Answer]:
    """A call that is repeated while its failure is transient.

    Args:
      call: The call.
      seconds: How long it is repeated.
      on_failure: Called with each transient failure; its exceptions end the call.
    """

    def tried(*args: Any) -> _Answer:
        try:
            return call(*args)
        except Exception as err:  # `Retry` costs 20 microseconds, and its import, which most calls can do without
            if not is_transient_error(err):
                raise
            if on_failure:
                on_failure(err)
            if seconds <= 0:
                raise
        from google.api_core.retry import Retry

        again = Retry(is_transient_error, initial=0.2, maximum=_LONGEST_WAIT_SECONDS, timeout=seconds, on_error=on_failure)
        answer: _Answer = again(call)(*args)
        return answer

    return tried


def kind_of_error(err: BaseException, otherwise: type[UserError]) -> type[UserError]:
    """The kind of error for a user: `AwayError` if the failure is transient, else another one."""
    return AwayError if is_transient_error(err) else otherwise


def is_transient_error(err: BaseException) -> bool:
    """Whether a failure of storage, of Pub/Sub or of a server is transient, and worth a retry."""
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
