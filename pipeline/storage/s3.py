"""Amazon S3, and what speaks its protocol, through boto3: its errors become those of Google's libraries, which callers know.

Beam's own file system makes a client for each call (0.17 s of CPU), repeats a call without credentials for ten minutes, and lists
no ETags. boto3 takes credentials, region and endpoint (`AWS_ENDPOINT_URL`) from the environment and `~/.aws`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

from pipeline.storage.name_ranges import NameRange
from pipeline.storage.store import EVERY_NAME, FoundFile, Reserve, Store, check_size

S3 = "s3://"


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
        message = err.response.get("Error", {}).get("Message") or str(err)
        raise from_http_status(err.response["ResponseMetadata"]["HTTPStatusCode"], message) from err
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as err:
        raise Forbidden(str(err)) from err
    except (exceptions.HTTPClientError, exceptions.ConnectionError, exceptions.IncompleteReadError) as err:
        raise ConnectionError(str(err)) from err


def _bucket_and_key(path: str) -> dict[str, str]:
    bucket, _, name = path.removeprefix(S3).partition("/")
    return {"Bucket": bucket, "Key": name}


def _etag(answer: Any) -> str:
    return str(answer["ETag"]).strip('"')
