"""Amazon S3, and what speaks its protocol, through boto3.

Beam's own file system makes a client for each call (0.17 s of CPU), repeats a call without credentials for ten minutes, and lists
no ETags. boto3 takes credentials, region and endpoint (`AWS_ENDPOINT_URL`) from the environment and `~/.aws`.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import mimetypes
import os
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO

from models.base.project import pip_install
from pipeline.storage.name_ranges import NameRange
from pipeline.storage.store import EVERY_NAME, ChangedError, FoundFile, Reserve, Store, StoreError, check_size, error_of_status

S3 = "s3://"
# with status 409, of two that write one object at once, and 400
_PASSING_CODES = ("ConditionalRequestConflict", "OperationAborted", "RequestTimeout")


class S3Store(Store):
    """Buckets of S3; an object's generation is its ETag."""

    lists_ranges = True

    def look_up(self, path: str, generation: str = "") -> FoundFile:
        with _client() as client:
            answer = client.head_object(**_bucket_and_key(path))
        return FoundFile(path, answer["ContentLength"], _etag(answer))

    def download(self, file: FoundFile, most_bytes: float, reserve: Reserve) -> tuple[bytes, str]:
        """The newest version, by one request."""
        with _client() as client:
            answer = client.get_object(**_bucket_and_key(file.path))
            with contextlib.closing(answer["Body"]) as body:
                found = FoundFile(file.path, answer["ContentLength"], _etag(answer))
                check_size(found, most_bytes, reserve)
                return body.read(), found.generation

    def list_folder(
        self, folder: str, beginning: str, one_folder: bool, names: NameRange = EVERY_NAME, at_once: int | None = None
    ) -> Iterator[FoundFile | str]:
        bucket, _, prefix = f"{folder}{beginning}".removeprefix(S3).partition("/")
        after, until = (path.removeprefix(f"{S3}{bucket}/") for path in names)
        wanted = {"Bucket": bucket, "Prefix": prefix, "Delimiter": "/" if one_folder else "", "StartAfter": after}
        with _client() as client:
            for page in client.get_paginator("list_objects_v2").paginate(**wanted, PaginationConfig={"PageSize": at_once}):
                found = page.get("Contents", ())
                yield from (FoundFile(f"{S3}{bucket}/{each['Key']}", each["Size"], _etag(each)) for each in found)
                yield from (each["Prefix"][:-1].rpartition("/")[2] for each in page.get("CommonPrefixes", ()))
                if until and found and found[-1]["Key"] > until:
                    return

    def read_range(self, path: str, start: int, end: int, generation: str = "") -> bytes:
        only_if = {"IfMatch": generation} if generation else {}
        with _client() as client:
            answer = client.get_object(Range=f"bytes={start}-{end - 1}", **_bucket_and_key(path), **only_if)
            content: bytes = answer["Body"].read()
        return content

    def age(self, path: str) -> tuple[float, str]:
        with _client() as client:
            answer = client.head_object(**_bucket_and_key(path))
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        return (now - answer["LastModified"]).total_seconds(), _etag(answer)

    def write(self, path: str, content: bytes | BinaryIO, over: str | None = None) -> str:
        """The content type follows the name. A file goes in parts, and takes no condition."""
        more = {"ContentType": mimetypes.guess_type(path)[0] or "application/octet-stream"}
        only_if = {} if over is None else {"IfMatch": over} if over else {"IfNoneMatch": "*"}
        place = _bucket_and_key(path)
        with _client() as client:
            if isinstance(content, bytes):
                return _etag(client.put_object(Body=content, **place, **more, **only_if))
            client.upload_fileobj(content, **place, ExtraArgs=more)
            return _etag(client.head_object(**place))

    def delete(self, path: str, generation: str = "") -> None:
        """Servers that do not know conditions of deletions ignore or refuse them; so the generation is looked up before."""
        place = _bucket_and_key(path)
        if generation and self.look_up(path).generation != generation:
            raise ChangedError(f"{path} has another ETag")
        with _client() as client:
            if generation:
                try:
                    client.delete_object(**place, IfMatch=generation)
                    return
                except client.exceptions.ClientError as err:
                    if err.response["ResponseMetadata"]["HTTPStatusCode"] != http.client.NOT_IMPLEMENTED:
                        raise
            client.delete_object(**place)


@functools.lru_cache(maxsize=1)
def _client_of(_process: int) -> Any:
    """A client for all threads of a process; it keeps connections open."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError as err:
        raise StoreError(f"{S3} is read by boto3: {pip_install('s3')}") from err
    again = {"total_max_attempts": 2}  # callers try again, too
    return boto3.session.Session().client(
        "s3", config=Config(max_pool_connections=64, connect_timeout=10, read_timeout=30, retries=again)
    )


@contextlib.contextmanager
def _client() -> Iterator[Any]:
    client = _client_of(os.getpid())
    from botocore import exceptions

    try:
        yield client
    except exceptions.ClientError as err:
        said, status = err.response.get("Error", {}), err.response["ResponseMetadata"]["HTTPStatusCode"]
        message = said.get("Message") or str(err)
        passes = said.get("Code") in _PASSING_CODES
        raise (StoreError(message, transient=True) if passes else error_of_status(status, message)) from err
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as err:
        raise PermissionError(str(err)) from err
    except (exceptions.HTTPClientError, exceptions.ConnectionError, exceptions.IncompleteReadError) as err:
        raise StoreError(str(err), transient=True) from err


def _bucket_and_key(path: str) -> dict[str, str]:
    bucket, _, name = path.removeprefix(S3).partition("/")
    return {"Bucket": bucket, "Key": name}


def _etag(answer: Any) -> str:
    return str(answer.get("ETag", "")).strip('"')
