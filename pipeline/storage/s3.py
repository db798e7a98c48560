"""Amazon S3, and what speaks its protocol, through boto3: its errors become those of Google's libraries, which callers know.

Beam's own file system makes a client for each call (0.17 s of CPU), repeats a call without credentials for ten minutes, and lists
no ETags. boto3 takes credentials, region and endpoint (`AWS_ENDPOINT_URL`) from the environment and `~/.aws`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

S3 = "s3://"
_BUFFER_BYTES = 8 << 20  # of what is read piece by piece

Found = tuple[str, int, str]  # path, size in bytes, ETag


def look_up(path: str) -> Found:
    """An object; raises errors of `google.api_core`, and `ConnectionError` where no answer comes."""
    with _client() as client:
        answer = client.head_object(**_place(path))
    return path, answer["ContentLength"], _etag(answer)


def download(path: str, check: Callable[[int], None]) -> tuple[bytes, str]:
    """The content of an object and its ETag, by one request; `check` is called with its size before memory is taken."""
    with _client() as client:
        answer = client.get_object(**_place(path))
        with contextlib.closing(answer["Body"]) as body:
            check(answer["ContentLength"])
            return body.read(), _etag(answer)


def list_objects(bucket: str, prefix: str, one_folder: bool) -> Iterator[Found | str]:
    """Objects page by page, and the names of subfolders if only one folder is listed."""
    with _client() as client:
        for page in client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=prefix, Delimiter="/" if one_folder else ""
        ):
            yield from ((f"{S3}{bucket}/{each['Key']}", each["Size"], _etag(each)) for each in page.get("Contents", ()))
            yield from (each["Prefix"][:-1].rpartition("/")[2] for each in page.get("CommonPrefixes", ()))


def open_object(path: str) -> io.BufferedReader:
    """Opens an object as a file; reading fails if it is replaced meanwhile."""
    return ObjectFile.opened(look_up(path), read_range)


def read_range(path: str, start: int, end: int, etag: str = "") -> bytes:
    """Reads the bytes `[start, end)` of an object, if it has such bytes, and only of the given ETag."""
    only_if = {"IfMatch": etag} if etag else {}
    with _client() as client:
        answer = client.get_object(Range=f"bytes={start}-{end - 1}", **_place(path), **only_if)
        content: bytes = answer["Body"].read()
    return content


class ObjectFile(io.RawIOBase):
    """An object as a file; `read` takes its path, the first byte, the byte after the last, and the ETag."""

    def __init__(self, found: Found, read: Callable[[str, int, int, str], bytes]) -> None:
        self._path, self._size, self._etag = found
        self._read, self._at = read, 0

    @classmethod
    def opened(cls, found: Found, read: Callable[[str, int, int, str], bytes]) -> io.BufferedReader:
        """The object as a file that reads ahead."""
        return io.BufferedReader(cls(found, read), _BUFFER_BYTES)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._size, self._at + len(buffer))
        content = self._read(self._path, self._at, end, self._etag) if end > self._at else b""
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


@functools.lru_cache(maxsize=1)
def _client_of(_process: int) -> Any:
    """A client for all threads of a process; it keeps connections open."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError as err:
        raise OSError(f"{S3} is read by boto3: pip install 'hybrid-detection-pipeline[s3]'") from err
    again = {"total_max_attempts": 2}  # callers try again, too
    return boto3.session.Session().client(
        "s3", config=Config(max_pool_connections=64, connect_timeout=10, read_timeout=30, retries=again)
    )


@contextlib.contextmanager
def _client() -> Iterator[Any]:
    client = _client_of(os.getpid())
    from botocore import exceptions
    from google.api_core.exceptions import Forbidden, from_http_status

    try:
        yield client
    except exceptions.ClientError as err:
        said = err.response.get("Error", {}).get("Message") or str(err)
        raise from_http_status(err.response["ResponseMetadata"]["HTTPStatusCode"], said) from err
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as err:
        raise Forbidden(str(err)) from err
    except (exceptions.HTTPClientError, exceptions.ConnectionError, exceptions.IncompleteReadError) as err:
        raise ConnectionError(str(err)) from err


def _place(path: str) -> dict[str, str]:
    bucket, _, name = path.removeprefix(S3).partition("/")
    return {"Bucket": bucket, "Key": name}


def _etag(answer: Any) -> str:
    return str(answer["ETag"]).strip('"')
