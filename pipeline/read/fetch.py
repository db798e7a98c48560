"""Reads one image from storage, with a circuit breaker for stores that fail; names what is wrong where storage fails.

Imports neither Beam nor TensorFlow.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import BinaryIO

from msgspec.structs import replace

from pipeline.errors import StorageAwayError, UserError
from pipeline.failures import ImageError
from pipeline.limits import memory_room_bytes
from pipeline.read.prefetch import Read
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.secrets import masked_text
from pipeline.stats.process import PROCESS
from pipeline.storage.store import FoundFile, Reserve, is_transient_error, retried
from pipeline.storage.stores import store_of
from pipeline.storage.web import is_web, without_query

RETRY_SECONDS = 60.0
GIVE_UP_SECONDS = 10 * RETRY_SECONDS
_AGAIN_SECONDS = 5.0

_log = logging.getLogger(__name__)


class StorageUnavailableError(ImageError):
    """A transient failure of storage or credentials: nothing is wrong with the image, and a later read may succeed."""

    def __init__(self, message: str):
        super().__init__("read", "storage_unavailable", message)


def fetch(
    ref: ImageRef,
    max_bytes: int,
    reserve: Reserve = lambda _size_bytes: None,
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
        wanted = FoundFile(ref.location, ref.size_bytes, ref.generation)
        return retried(store_of(ref.location).download, retry_seconds, on_failure)(wanted, max_bytes, reserve)


@contextlib.contextmanager
def open_file(uri: str, retry_seconds: float = RETRY_SECONDS, generation: str = "") -> Iterator[BinaryIO]:
    """Opens a file, or an object of this generation, for reading, without decompression.

    Raises:
      ImageError: See `storage_failures`; also while the file is read.
    """
    with storage_failures(uri), store_of(uri).open(uri, generation, retry_seconds) as file:
        yield file


@contextlib.contextmanager
def storage_failures(uri: str) -> Iterator[None]:
    """Maps all exceptions of storage in its block to an `ImageError` that says what is wrong with the file.

    Errors that are not the file's fault pass: this process is short of memory, or nobody needs the image any more.

    Raises:
      StorageUnavailableError: A transient failure; the same read may succeed later.
      ImageError: The file is missing, forbidden or unreadable.
    """
    try:
        yield
    except (ImageError, UserError, MemoryError, CancelledError):
        raise
    except Exception as err:
        raise _image_error(uri, err) from err


def _image_error(uri: str, err: Exception) -> ImageError:
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError

    query, uri = (uri.partition("?")[2], without_query(uri)) if is_web(uri) else ("", uri)
    for kinds, reason, what in (
        ((FileNotFoundError, exceptions.NotFound), "not_found", "does not exist"),
        ((IsADirectoryError,), "not_a_file", "is a folder"),
        ((PermissionError,), "permission_denied", "may not be read by this user"),
        ((exceptions.Forbidden, exceptions.Unauthorized), "permission_denied", "may not be read with these credentials"),
    ):
        if isinstance(err, kinds):
            return ImageError("read", reason, f"{uri} {what}")
    cause = getattr(err, "cause", None) or err  # `RetryError` has the failure of its last try
    message = str(getattr(cause, "message", None) or cause)
    message = " ".join((message.replace(query, "***") if query else message).split())[:300]
    if isinstance(cause, GoogleAuthError):
        return StorageUnavailableError(f"{uri} cannot be read for want of credentials: {message}")
    if is_transient_error(err):
        return StorageUnavailableError(f"{uri} cannot be read now, storage does not answer as it should: {message}")
    kind = "" if isinstance(cause, (OSError, ValueError, exceptions.GoogleAPIError)) and message else f"{type(cause).__name__}: "
    return ImageError("read", "unreadable", f"{uri} cannot be read: {kind}{message}")


def note_storage(failure: str, how_long: str = "") -> None:
    """Notes for this process that storage fails, and how long each image is tried again; without a failure, that it is back."""
    PROCESS.parts["read"].progressed()  # a try has returned
    if failure and "storage" not in PROCESS.failing:
        _log.warning("storage fails (%s); each image is tried again %s", failure, how_long)
    if failure:
        PROCESS.failing["storage"] = failure
    elif PROCESS.failing.pop("storage", ""):
        _log.warning("storage is back")


class CircuitBreaker:
    """Circuit breaker for stores, shared by concurrent reads; thread-safe. A store is all that one scheme names.

    While a store fails, each read is retried for `retry_seconds`. A store that has answered none for `give_up_seconds` is away.
    An image that a message names waits for its store until this has answered another read, since the message can be held.

    Args:
      retry_seconds: How long one read is retried.
      give_up_seconds: How long all reads of a store may fail before it is away.
      note: See `note_storage`.
      clock: Monotonic seconds.

    Attributes:
      stop: Ends all retries and all waiting once it is set.
    """

    def __init__(
        self,
        retry_seconds: float = RETRY_SECONDS,
        give_up_seconds: float = GIVE_UP_SECONDS,
        note: Callable[[str, str], object] = note_storage,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._retry_seconds = retry_seconds
        self._give_up_seconds = give_up_seconds
        self._note = note
        self._clock = clock
        self.stop = threading.Event()
        self._failing_since: dict[str, float] = {}
        self._answered_at: dict[str, float] = {}

    def is_away(self, uri: str) -> bool:
        """Whether no read of this image's store has succeeded for long."""
        return self._clock() - self._failing_since.get(_store_of(uri), math.inf) >= self._give_up_seconds

    def retry_seconds(self, uri: str) -> float:
        """How long the read of an image is retried; not at all if it is one of many at web servers that are away."""
        return 0.0 if is_web(uri) and self.is_away(uri) else self._retry_seconds

    def failed(self, ref: ImageRef, failure: str) -> None:
        """Notes a transient failure of one try."""
        self._failing_since.setdefault(_store_of(ref.uri), self._clock())
        how_long = "until it is back" if _waits_for_store(ref) else f"for {self._retry_seconds:g} s"
        self._note(" ".join(masked_text(failure).split())[:300], how_long)

    def waits(self, ref: ImageRef, began: float) -> bool:
        """Whether an image whose reading began then is read again, though its store has failed for as long as one is retried."""
        is_retried = self._clock() + _AGAIN_SECONDS >= began + self._retry_seconds
        has_answered = self._answered_at.get(_store_of(ref.uri), -math.inf) >= began
        return _waits_for_store(ref) and not (is_retried and has_answered) and not self.stop.is_set()

    def succeeded(self, uri: str) -> None:
        """Notes that the store of an image has answered."""
        store = _store_of(uri)
        self._answered_at[store] = self._clock()
        if self._failing_since.pop(store, None) is not None:
            self._note("", "")


def _store_of(uri: str) -> str:
    return uri.partition("://")[0] if "://" in uri else ""


def _waits_for_store(ref: ImageRef) -> bool:
    """Whether an image waits for a store that is away. None does for a web server, which anybody may name."""
    return bool(ref.message_id) and not is_web(ref.uri)


def read_image(read: Read, max_bytes: int, breaker: CircuitBreaker) -> EncodedImage | DeadLetter:
    """Reads one image, or makes the dead letter that says why it cannot be read.

    Raises:
      StorageAwayError: Its store is away, and the image waits for none.
      MemoryError: Memory is short, though it has room for such an image.
    """
    began = time.monotonic()
    while True:
        try:
            return _read_image(read, max_bytes, breaker)
        except StorageUnavailableError as err:
            if not breaker.waits(read.ref, began) or read.abandoned:
                return err.dead_letter(read.ref)
            breaker.failed(read.ref, str(err))  # also for missing credentials, which a single read does not retry
            breaker.stop.wait(_AGAIN_SECONDS)


def _read_image(read: Read, max_bytes: int, breaker: CircuitBreaker) -> EncodedImage | DeadLetter:
    ref = read.ref

    def wait(err: Exception) -> None:
        breaker.failed(ref, str(err))
        if read.abandoned or breaker.stop.is_set():  # nobody waits for it any more
            raise err

    received_at, started = time.time(), time.monotonic()
    try:
        content, generation = fetch(ref, max_bytes, read.reserve, breaker.retry_seconds(ref.uri), wait)
    except StorageUnavailableError as err:
        if breaker.is_away(ref.uri) and not (is_web(ref.uri) or ref.message_id):
            raise StorageAwayError(f"storage is away, and nothing could be read from it for minutes: {err}") from err
        raise
    except ImageError as err:
        breaker.succeeded(ref.uri)  # it answered
        return err.dead_letter(ref)
    except MemoryError:
        if read.held_bytes <= memory_room_bytes():
            raise  # memory was short for a moment
        message = f"{ref.uri} has {read.held_bytes / 1e6:.0f} MB, which do not fit into memory; max_file_mb sets the limit"
        return ImageError("read", "unreadable", message).dead_letter(ref)
    breaker.succeeded(ref.uri)
    return EncodedImage(replace(ref, generation=generation), content, time.monotonic() - started, received_at)
