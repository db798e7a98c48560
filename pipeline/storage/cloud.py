"""Cloud Storage, through its own client: fewer requests than Beam's file system takes, and generations, which that has not."""

from __future__ import annotations

import contextlib
import io
import mimetypes
import os
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any

from pipeline.storage.store import FoundFile, Reserve, Store, check_size

GS = "gs://"
_FIELDS = "items(bucket,name,size,generation),prefixes,nextPageToken"  # of a listing
_IDLE_SECONDS = 60.0  # after it a client is closed: servers close idle connections, whose sockets would stay open here
_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)

_idle: list[tuple[float, Any]] = []  # since when, and a client with an open connection; the last one is lent first
os.register_at_fork(after_in_child=lambda: _idle.clear())  # noqa: PLW0108  the list of that moment; a connection is one process's


@contextlib.contextmanager
def storage_client() -> Iterator[Any]:
    """Lends a client to one user at a time; its connection stays open for the next user."""
    idle = _idle  # the client returns to where it came from
    try:
        client = idle.pop()[1]
    except IndexError:
        client = _new_client()
    try:
        yield client
    finally:
        idle.append((time.monotonic(), client))
        with contextlib.suppress(IndexError):  # another thread took the last one
            while idle[0][0] < time.monotonic() - _IDLE_SECONDS:
                idle.pop(0)[1].close()


def _new_client() -> Any:
    """A client with the credentials that Beam finds, too; an anonymous one without any: public buckets need none."""
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud import storage

    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return storage.Client.create_anonymous_client()
    try:
        credentials, project = google.auth.default(scopes=_SCOPES)
    except DefaultCredentialsError:
        return storage.Client.create_anonymous_client()
    return storage.Client(project=project or "unknown", credentials=credentials)  # only buckets' listings name a project


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


def write_object(path: str, content: bytes, *, if_generation: int | None = None) -> bool:
    """Writes a small object, `gs://…`, in one request: all of it or nothing.

    Its content type follows its ending, so that a browser shows a page from its address.

    Args:
      path: The object.
      content: All of it.
      if_generation: Write only over this generation; 0: only where there is no object. Of several writers at once, one succeeds.

    Returns:
      False where the object did not have this generation, also where a lost answer made the client try again.
    """
    from google.api_core.exceptions import NotFound, PreconditionFailed
    from google.cloud.storage.retry import DEFAULT_RETRY

    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    only_if: dict[str, Any] = {} if if_generation is None else {"if_generation_match": if_generation}
    with storage_client() as client:
        try:
            # a retry is safe without a precondition: the content is the same
            blob_of(client, path).upload_from_string(content, content_type=kind, retry=DEFAULT_RETRY, **only_if)
        except (PreconditionFailed, NotFound):
            if if_generation is None:
                raise
            return False
    return True


def delete_object(path: str, generation: str = "") -> None:
    """Deletes an object, `gs://…`, only of the given generation if there is one; a missing object is no error."""
    from google.api_core.exceptions import NotFound, PreconditionFailed
    from google.cloud.storage.retry import DEFAULT_RETRY

    only_if = {"if_generation_match": int(generation)} if generation else {}
    with storage_client() as client, contextlib.suppress(NotFound, PreconditionFailed):
        blob_of(client, path).delete(retry=DEFAULT_RETRY, **only_if)


def move_object(path: str, new: str, generation: str) -> bool:
    """Renames an object, `gs://…`, of the given generation; an object that has the new name is replaced.

    Returns:
      Whether the object was there, and still had this generation.
    """
    from google.api_core.exceptions import NotFound, PreconditionFailed
    from google.cloud.storage.retry import DEFAULT_RETRY

    if not generation:
        return False
    with storage_client() as client:
        blob, target = blob_of(client, path), blob_of(client, new)
        only_if = {"if_source_generation_match": int(generation)}
        try:
            # keeps content and type; within a bucket no bytes are copied
            blob.bucket.copy_blob(blob, target.bucket, target.name, retry=DEFAULT_RETRY, **only_if)
        except (NotFound, PreconditionFailed):
            return False
    delete_object(path, generation)
    return True


def blob_of(client: Any, path: str, generation: str = "") -> Any:
    """An object, `gs://…`, of the given generation, else of the newest; makes no request."""
    bucket, _, name = path.removeprefix(GS).partition("/")
    return client.bucket(bucket).blob(name, generation=int(generation) if generation else None)


class GoogleStore(Store):
    """Buckets of Cloud Storage."""

    def look_up(self, path: str, generation: str = "") -> FoundFile:
        with storage_client() as client:
            blob = blob_of(client, path, generation)
            blob.reload(retry=None)
            return _found(blob)

    def download(self, file: FoundFile, most_bytes: float, reserve: Reserve) -> tuple[bytes, str]:
        """The content, by one request if the size is known."""
        with storage_client() as client:
            blob, size = blob_of(client, file.path, file.generation), file.size_bytes
            while True:
                if not 0 < size <= most_bytes:  # unknown, or too large when it was listed
                    blob.reload(retry=None)
                    size = blob.size or 0
                check_size(size, most_bytes, reserve, str(blob.generation or file.generation))
                content = _AtMost(size)
                try:
                    blob.download_to_file(content, raw_download=True, retry=None)
                    break
                except _LargerError:
                    size = 0
            if blob.generation is None:  # Cloud Storage sends it along; not everything that speaks its protocol does
                blob.reload(retry=None)
            return content.getvalue(), str(blob.generation or file.generation)

    def list_folder(self, folder: str, beginning: str, one_folder: bool) -> Iterator[FoundFile | str]:
        bucket, _, prefix = f"{folder}{beginning}".removeprefix(GS).partition("/")
        with storage_client() as client:
            delimiter = "/" if one_folder else None
            for page in client.list_blobs(bucket, prefix=prefix or None, delimiter=delimiter, fields=_FIELDS).pages:
                yield from map(_found, page)
                yield from (name[:-1].rpartition("/")[2] for name in page.prefixes)

    def read_range(self, path: str, start: int, end: int, generation: str = "") -> bytes:
        only_if = {"if_generation_match": int(generation)} if generation else {}
        with storage_client() as client:
            # the checksum is of the whole object
            how = {"raw_download": True, "checksum": None, "retry": None}
            content: bytes = blob_of(client, path).download_as_bytes(start=start, end=end - 1, **how, **only_if)
        return content


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
