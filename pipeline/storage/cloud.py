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


def write_object(path: str, content: bytes, *, once: bool = False) -> bool:
    """Writes a small object, `gs://…`, in one request: there is all of it or nothing.

    Its type is that of its ending, so that a browser shows a page from its address.

    Args:
      path: The object.
      content: All of it.
      once: Only where there is none; of several who do so at once, one does.

    Returns:
      Whether it is known to be written; with `once` and an answer that is lost on its way, it is and nobody knows.
    """
    from google.api_core.exceptions import PreconditionFailed
    from google.cloud.storage.retry import DEFAULT_RETRY

    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    only_if: dict[str, Any] = {"if_generation_match": 0} if once else {}
    with storage_client() as client:
        try:
            # made again after a failure whether or not it was made: the content is the same
            _blob(client, path).upload_from_string(content, content_type=kind, retry=DEFAULT_RETRY, **only_if)
        except PreconditionFailed:
            return False
    return True


def delete_object(path: str, generation: str = "") -> None:
    """Deletes an object, `gs://…`, where one is given of just this generation; none is no error."""
    from google.api_core.exceptions import NotFound, PreconditionFailed
    from google.cloud.storage.retry import DEFAULT_RETRY

    only_if = {"if_generation_match": int(generation)} if generation else {}
    with storage_client() as client, contextlib.suppress(NotFound, PreconditionFailed):
        _blob(client, path).delete(retry=DEFAULT_RETRY, **only_if)


def move_object(path: str, new: str, generation: str) -> bool:
    """Gives an object, `gs://…`, of just this generation another name; what has that name is replaced.

    Returns:
      Whether it was there; somebody else may have moved or overwritten it.
    """
    from google.api_core.exceptions import NotFound, PreconditionFailed
    from google.cloud.storage.retry import DEFAULT_RETRY

    with storage_client() as client:
        blob, target = _blob(client, path), _blob(client, new)
        only_if = {"if_source_generation_match": int(generation)}
        try:
            # content and type stay; within a bucket no bytes are copied
            blob.bucket.copy_blob(blob, target.bucket, target.name, retry=DEFAULT_RETRY, **only_if)
        except (NotFound, PreconditionFailed):
            return False
    delete_object(path, generation)
    return True


def read_range(path: str, start: int, end: int) -> bytes:
    """The bytes of an object, `gs://…`, from `start` to before `end`: one request for just these."""
    with storage_client() as client:
        # no checksum: it is one of the whole object
        content: bytes = _blob(client, path).download_as_bytes(start=start, end=end - 1, raw_download=True, checksum=None)
    return content


def _blob(client: Any, path: str) -> Any:
    bucket, _, name = path.removeprefix("gs://").partition("/")
    return client.bucket(bucket).blob(name)
