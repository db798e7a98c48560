"""Cloud Storage, through its own client: fewer requests than Beam's file system takes, and generations, which that has not."""

from __future__ import annotations

import contextlib
import functools
import io
import mimetypes
import os
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO

from pipeline.storage.name_ranges import NameRange
from pipeline.storage.store import (
    EVERY_NAME,
    CredentialsError,
    FoundFile,
    Reserve,
    Store,
    StoreError,
    check_size,
    connection_error,
    error_of_status,
    mapped,
)

GS = "gs://"
_FIELDS = "items(bucket,name,size,generation),prefixes,nextPageToken"  # of a listing
_CONNECTIONS = 256  # of a process that stay open for the next request
_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)


def storage_client() -> Any:
    """A client for all threads of a process; it keeps connections open."""
    return _client_of(os.getpid(), os.environ.get("STORAGE_EMULATOR_HOST", ""))


@functools.lru_cache(maxsize=1)
def _client_of(_process: int, emulator: str) -> Any:
    """A client with the credentials that Beam finds, too; an anonymous one without any: public buckets need none."""
    import google.auth
    import requests
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud import storage

    try:
        credentials, project = google.auth.default(scopes=_SCOPES) if not emulator else (None, None)
    except DefaultCredentialsError:
        credentials = None
    if credentials:
        client = storage.Client(project=project or "unknown", credentials=credentials)  # only buckets' listings name a project
    else:
        client = storage.Client.create_anonymous_client()
    if not client._http.is_mtls:  # with client certificates it has an adapter of its own
        for scheme in ("http://", "https://"):  # the client has no option for the number of connections
            client._http.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=_CONNECTIONS))
    return client


@contextlib.contextmanager
def server_times(client: Any) -> Iterator[list[float]]:
    """The server's own time of each answer that a client gets while this lasts, in seconds since the epoch."""
    times: list[float] = []

    def note(answer: Any, **_: object) -> None:
        times.append(parsedate_to_datetime(answer.headers["Date"]).timestamp())

    hooks = client._http.hooks["response"]  # the client gives no public access to the headers of an answer
    hooks.append(note)
    try:
        yield times
    finally:
        hooks.remove(note)


def blob_of(path: str, generation: str = "") -> Any:
    """An object, `gs://…`, of the given generation, else of the newest; makes no request."""
    bucket, _, name = path.removeprefix(GS).partition("/")
    return storage_client().bucket(bucket).blob(name, generation=int(generation) if generation else None)


def google_error(err: Exception) -> Exception:
    """The error of a store that one of Google's clients, or of their connections, means; another one as it is."""
    from google.api_core.exceptions import GoogleAPICallError, RetryError, ServerError
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.cloud.storage.exceptions import DataCorruption

    if isinstance(err, GoogleAuthError):
        return CredentialsError(str(err), transient=isinstance(err, TransportError) or bool(err.retryable))
    if isinstance(err, (ServerError, RetryError, DataCorruption)):
        return StoreError(str(getattr(err, "cause", None) or err), transient=True)
    if isinstance(err, GoogleAPICallError):
        return error_of_status(err.code or 0, str(err.message))
    return connection_error(err)


class GoogleStore(Store):
    """Buckets of Cloud Storage."""

    lists_ranges = True

    def look_up(self, path: str, generation: str = "") -> FoundFile:
        with mapped(google_error):
            blob = blob_of(path, generation)
            blob.reload(retry=None)
        return _found(blob)

    def download(self, file: FoundFile, most_bytes: float, reserve: Reserve) -> tuple[bytes, str]:
        """The content, by one request if the size is known."""
        with mapped(google_error):
            blob, size = blob_of(file.path, file.generation), file.size_bytes
            while True:
                if not 0 < size <= most_bytes:  # unknown, or too large when it was listed
                    blob.reload(retry=None)
                    size = blob.size or 0
                check_size(FoundFile(file.path, size, str(blob.generation or file.generation)), most_bytes, reserve)
                content = _AtMost(size)
                try:
                    blob.download_to_file(content, raw_download=True, retry=None)
                    break
                except _LargerError:
                    size = 0
            if blob.generation is None:  # Cloud Storage sends it along; not everything that speaks its protocol does
                blob.reload(retry=None)
        return content.getvalue(), str(blob.generation or file.generation)

    def list_folder(
        self, folder: str, beginning: str, one_folder: bool, names: NameRange = EVERY_NAME, at_once: int | None = None
    ) -> Iterator[FoundFile | str]:
        bucket, _, prefix = f"{folder}{beginning}".removeprefix(GS).partition("/")
        after, until = (path.removeprefix(f"{GS}{bucket}/") for path in names)
        how = {"prefix": prefix or None, "delimiter": "/" if one_folder else None, "fields": _FIELDS, "page_size": at_once}
        within = {
            "start_offset": after or None,
            "end_offset": f"{until}!" if until else None,
        }  # from the first, before the second
        with mapped(google_error):
            for page in storage_client().list_blobs(bucket, **how, **within).pages:
                yield from map(_found, page)
                yield from (name[:-1].rpartition("/")[2] for name in page.prefixes)

    def read_range(self, path: str, start: int, end: int, generation: str = "") -> bytes:
        only_if = int(generation) if generation else None
        # the checksum is of the whole object
        how = {"raw_download": True, "checksum": None, "retry": None}
        with mapped(google_error):
            content: bytes = blob_of(path).download_as_bytes(start=start, end=end - 1, if_generation_match=only_if, **how)
        return content

    def age(self, path: str) -> tuple[float, str]:
        with mapped(google_error), server_times(storage_client()) as times:
            (blob := blob_of(path)).reload(retry=None)
        return max(0.0, times[-1] - blob.updated.timestamp()), str(blob.generation)  # the header has whole seconds

    def write(self, path: str, content: bytes | BinaryIO, over: str | None = None) -> str:
        """The content type follows the name, so that a browser shows a page from its address."""
        from google.cloud.storage.retry import DEFAULT_RETRY

        kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
        only_if = None if over is None else int(over or 0)
        with mapped(google_error):
            blob = blob_of(path)
            if isinstance(content, bytes):
                blob.upload_from_string(content, content_type=kind, if_generation_match=only_if, retry=None)
            else:  # each piece of a large file by itself
                blob.upload_from_file(content, content_type=kind, if_generation_match=only_if, retry=DEFAULT_RETRY)
        return str(blob.generation)

    def delete(self, path: str, generation: str = "") -> None:
        with mapped(google_error):
            blob_of(path).delete(if_generation_match=int(generation) if generation else None, retry=None)


def _found(blob: Any) -> FoundFile:
    return FoundFile(f"{GS}{blob.bucket.name}/{blob.name}", blob.size or 0, str(blob.generation or ""))


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
