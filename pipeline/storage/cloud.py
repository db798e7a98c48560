"""Cloud Storage's own client, where Beam's file systems would take more requests."""

from __future__ import annotations

import contextlib
import mimetypes
from collections.abc import Iterator
from typing import Any

_idle: list[Any] = []


@contextlib.contextmanager
def storage_client() -> Iterator[Any]:
    """Beam's own Cloud Storage client, which nobody else uses meanwhile; each keeps its connection for who comes next."""
    from apache_beam.io.gcp.gcsio import GcsIO

    client = _idle.pop() if _idle else GcsIO().client
    try:
        yield client
    finally:
        _idle.append(client)


def write_object(path: str, content: bytes) -> None:
    """Writes a small object, `gs://…`, in one request: there is all of it or nothing.

    Its type is that of its ending, so that a browser shows a page from its address.
    """
    from google.cloud.storage.retry import DEFAULT_RETRY

    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    bucket, _, name = path.removeprefix("gs://").partition("/")
    with storage_client() as client:
        # made again after a failure whether or not it was made: the content is the same
        client.bucket(bucket).blob(name).upload_from_string(content, content_type=kind, retry=DEFAULT_RETRY)


def read_range(path: str, start: int, end: int) -> bytes:
    """The bytes of an object, `gs://…`, from `start` to before `end`: one request for just these."""
    bucket, _, name = path.removeprefix("gs://").partition("/")
    with storage_client() as client:
        # no checksum: it is one of the whole object
        content: bytes = (
            client.bucket(bucket).blob(name).download_as_bytes(start=start, end=end - 1, raw_download=True, checksum=None)
        )
    return content
