"""The interface of a store of files. Each call is one attempt; `retried` repeats one while its failure may pass.

A store raises a `StoreError`, whose `transient` tells whether a retry may help. What is not there is a `FileNotFoundError`, and
what these credentials may not do a `PermissionError`, as on a disk. So no caller knows the errors of the stores' clients.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import io
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple, TypeVar

from pipeline.errors import AwayError, UserError
from pipeline.failures import ImageError
from pipeline.process import PROCESS
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
      fault: Why it is a local folder of which not all could be listed; None: it is a file.
    """

    path: str
    size_bytes: int = 0
    generation: str = ""
    fault: OSError | None = None


class StoreError(Exception):
    """A store fails, or refuses a call.

    Attributes:
      transient: Whether the same call may succeed later.
    """

    def __init__(self, message: str, *, transient: bool = False):
        super().__init__(message)
        self.transient = transient


class ChangedError(StoreError):
    """An object has another generation than the call is for."""


class CredentialsError(StoreError):
    """Credentials are missing, or whoever gives them does not."""


_OF_STATUS: dict[int, type[Exception]] = {
    http.client.UNAUTHORIZED: PermissionError,
    http.client.FORBIDDEN: PermissionError,
    http.client.NOT_FOUND: FileNotFoundError,
    http.client.PRECONDITION_FAILED: ChangedError,
}
_PASSING_STATUS = (http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS)


def error_of_status(status: int, message: str) -> Exception:
    """The error that the HTTP status of a store's answer means."""
    if kind := _OF_STATUS.get(status):
        return kind(message)
    fails = status >= http.client.INTERNAL_SERVER_ERROR and status != http.client.NOT_IMPLEMENTED
    return StoreError(message, transient=fails or status in _PASSING_STATUS)


@contextlib.contextmanager
def mapped(error_of: Callable[[Exception], Exception]) -> Iterator[None]:
    """Maps the errors of a client by a function that gives those that it does not know back."""
    try:
        yield
    except Exception as err:
        known = error_of(err)
        if known is err:
            raise
        raise known from err


def connection_error(err: Exception) -> Exception:
    """The error of a store that one of `requests`, or of urllib3 below it, means; another one as it is."""
    import requests
    import urllib3

    of_requests, of_urllib3 = requests.exceptions, urllib3.exceptions.HTTPError
    if not isinstance(err, (of_requests.RequestException, of_urllib3)):
        return err
    passing = (of_requests.ConnectionError, of_requests.Timeout, of_requests.ChunkedEncodingError, of_requests.JSONDecodeError)
    return StoreError(str(err), transient=isinstance(err, (*passing, of_urllib3)))


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

    def write(self, path: str, content: bytes | BinaryIO, over: str | None = None) -> str:
        """Writes a whole object, all of it or nothing, and returns its generation.

        Args:
          path: Its name.
          content: Its bytes, or an open file of any size, which are read from the beginning.
          over: Only over the object of this generation; empty: only where there is none; None: whatever is there.

        Raises:
          ChangedError: The object has another generation, or there is one. That may be what an earlier try wrote whose answer was
            lost.
        """
        raise StoreError(f"{path} cannot be written: expected a folder on this machine, gs://, s3:// or abfs://")

    def delete(self, path: str, generation: str = "") -> None:
        """Deletes an object, only of the given generation if there is one; a missing one may be an error or none.

        Raises:
          ChangedError: It has another generation.
        """
        raise NotImplementedError

    def age(self, path: str) -> tuple[float, str]:
        """How many seconds ago an object was written, by the clock of the store, and its generation."""
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
        self._path, self._size, self._generation = found.path, found.size_bytes, found.generation
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
    """A call that is repeated while its failure is transient, and the job is not stopped; then its last failure is raised.

    Args:
      call: The call.
      seconds: How long it is repeated, from the beginning of the first try on.
      on_failure: Called with each transient failure; its exceptions end the call.
    """

    def may_pass(err: BaseException) -> bool:
        return is_transient_error(err) and not PROCESS.stopped

    def tried(*args: Any) -> _Answer:
        end = time.monotonic() + seconds
        try:
            return call(*args)
        except Exception as err:  # `Retry` costs 20 microseconds, and its import, which most calls can do without
            if not may_pass(err):
                raise
            if on_failure:
                on_failure(err)
            left = end - time.monotonic()
            if left <= 0:
                raise
        from google.api_core.exceptions import RetryError
        from google.api_core.retry import Retry

        again = Retry(may_pass, initial=0.2, maximum=_LONGEST_WAIT_SECONDS, timeout=left, on_error=on_failure)
        try:
            answer: _Answer = again(call)(*args)
        except RetryError as err:
            raise err.cause or err from err
        return answer

    return tried


def kind_of_error(err: BaseException, otherwise: type[UserError]) -> type[UserError]:
    """The kind of error for a user: `AwayError` if the failure is transient, else another one."""
    return AwayError if is_transient_error(err) else otherwise


def is_transient_error(err: BaseException) -> bool:
    """Whether a failure of a store, a disk or a connection is transient, and worth a retry."""
    if isinstance(err, StoreError):
        return err.transient
    is_short = isinstance(err, OSError) and err.errno in _PASSING_ERRNOS
    return is_short or isinstance(err, (ConnectionError, TimeoutError, http.client.HTTPException))
