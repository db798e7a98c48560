"""Azure Blob Storage through azure-storage-blob."""

from __future__ import annotations

import contextlib
import functools
import mimetypes
import os
import re
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO

from models.base.project import pip_install
from pipeline.storage.name_ranges import NameRange
from pipeline.storage.store import EVERY_NAME, ChangedError, FoundFile, Reserve, Store, StoreError, check_size, error_of_status

ABFS = "abfs://"
_FIRST_BYTES = 8 << 20  # of an object, in the answer that says its size
_ACCOUNT = re.compile(r"([a-z0-9]{3,24})\.dfs\.core\.windows\.net")  # no other host gets the credentials


class AzureStore(Store):
    """Containers of Azure; an object's generation is its ETag."""

    def look_up(self, path: str, generation: str = "") -> FoundFile:
        with _blob(path) as blob:
            found = blob.get_blob_properties()
        if _is_folder(found):
            raise FileNotFoundError(f"{path} is a folder")
        return FoundFile(path, found.size, _etag(found))

    def download(self, file: FoundFile, most_bytes: float, reserve: Reserve) -> tuple[bytes, str]:
        """The newest version; the size is known when 8 MiB of memory are taken."""
        with _blob(file.path) as blob:
            answer = blob.download_blob()
            found = FoundFile(file.path, answer.size, _etag(answer.properties))
            check_size(found, most_bytes, reserve)
            return answer.readall(), found.generation

    def list_folder(
        self, folder: str, beginning: str, one_folder: bool, names: NameRange = EVERY_NAME, at_once: int | None = None
    ) -> Iterator[FoundFile | str]:
        container, _, prefix = f"{folder}{beginning}".removeprefix(ABFS).partition("/")
        with _container(container) as client:
            wanted = {"name_starts_with": prefix or None, "include": ["metadata"]}
            for each in client.walk_blobs(**wanted) if one_folder else client.list_blobs(**wanted):
                if "etag" not in each:  # a prefix
                    yield each["name"][:-1].rpartition("/")[2]
                elif not _is_folder(each):
                    yield FoundFile(f"{ABFS}{container}/{each.name}", each.size, _etag(each))

    def read_range(self, path: str, start: int, end: int, generation: str = "") -> bytes:
        with _blob(path) as blob:
            content: bytes = blob.download_blob(offset=start, length=end - start, **_only_if(generation)).readall()
        return content

    def age(self, path: str) -> tuple[float, str]:
        dates: list[str] = []
        with _blob(path) as blob:
            found = blob.get_blob_properties(raw_response_hook=lambda answer: dates.append(answer.http_response.headers["Date"]))
        return (parsedate_to_datetime(dates[-1]) - found.last_modified).total_seconds(), _etag(found)

    def write(self, path: str, content: bytes | BinaryIO, over: str | None = None) -> str:
        """The content type follows the name."""
        with _blob(path) as blob:
            from azure.storage.blob import ContentSettings

            kind = ContentSettings(content_type=mimetypes.guess_type(path)[0] or "application/octet-stream")
            # without `overwrite` the client sends `If-None-Match: *`
            answer = blob.upload_blob(content, overwrite=over != "", content_settings=kind, **_only_if(over or ""))
        return str(answer["etag"]).strip('"')

    def delete(self, path: str, generation: str = "") -> None:
        with _blob(path) as blob:
            blob.delete_blob(**_only_if(generation))


@functools.lru_cache(maxsize=8)
def _client_of(_process: int, account: str) -> Any:
    """A client for all threads of a process; it keeps connections open."""
    try:
        from azure.identity import DefaultAzureCredential
        from azure.storage.blob import BlobServiceClient
    except ImportError as err:
        raise StoreError(f"{ABFS} is read by azure-storage-blob: {pip_install('azure')}") from err
    again = {"retry_total": 1, "initial_backoff": 1, "random_jitter_range": 1}  # callers try again, too
    options = {**again, "connection_timeout": 10, "read_timeout": 30, "max_single_get_size": _FIRST_BYTES}
    connection = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    if connection and not account:
        return BlobServiceClient.from_connection_string(connection, **options)
    account = account or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    if not account:
        raise StoreError(
            f"no storage account: set AZURE_STORAGE_CONNECTION_STRING or AZURE_STORAGE_ACCOUNT_NAME, "
            f"or write {ABFS}<container>@<account>.dfs.core.windows.net/<name>"
        )
    credential = os.environ.get("AZURE_STORAGE_ACCOUNT_KEY") or DefaultAzureCredential()
    return BlobServiceClient(f"https://{account}.blob.core.windows.net", credential=credential, **options)


@contextlib.contextmanager
def _container(address: str) -> Iterator[Any]:
    container, has_host, host = address.partition("@")
    account = _ACCOUNT.fullmatch(host)
    if has_host and not account:
        raise StoreError(f"{host} is no storage account: expected <account>.dfs.core.windows.net")
    client = _client_of(os.getpid(), account[1] if account else "")
    from azure.core import exceptions

    try:
        yield client.get_container_client(container)
    except exceptions.ClientAuthenticationError as err:
        raise PermissionError(_message(err)) from err
    except exceptions.ResourceExistsError as err:  # with status 409, where another store has 412
        raise ChangedError(_message(err)) from err
    except exceptions.HttpResponseError as err:
        if err.status_code is None or err.status_code < 400:
            raise StoreError(_message(err), transient=True) from err
        raise error_of_status(err.status_code, _message(err)) from err
    except exceptions.AzureError as err:
        raise StoreError(_message(err), transient=True) from err


@contextlib.contextmanager
def _blob(path: str) -> Iterator[Any]:
    container, _, name = path.removeprefix(ABFS).partition("/")
    with _container(container) as client:
        yield client.get_blob_client(name)


def _only_if(generation: str) -> dict[str, Any]:
    """The condition that an object has a generation; empty: none."""
    from azure.core import MatchConditions

    return {"etag": f'"{generation}"', "match_condition": MatchConditions.IfNotModified} if generation else {}


def _is_folder(found: Any) -> bool:
    """Whether this stands for a folder, as accounts with a hierarchical namespace keep them."""
    return (found.metadata or {}).get("hdi_isfolder") == "true"


def _message(err: Exception) -> str:
    return str(err).partition("\n")[0]


def _etag(found: Any) -> str:
    return str(found.etag).strip('"')
