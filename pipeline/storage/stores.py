"""The stores, by the schemes of their addresses."""

from __future__ import annotations

import contextlib

from pipeline.storage.azure import ABFS, AzureStore
from pipeline.storage.cloud import GS, GoogleStore
from pipeline.storage.local import LocalStore
from pipeline.storage.s3 import S3, S3Store
from pipeline.storage.store import Store, retried
from pipeline.storage.web import WEB, WebStore

LISTED = (GS, S3, ABFS)  # object storage
_LOCAL = LocalStore()
_STORES: dict[str, Store] = {GS: GoogleStore(), S3: S3Store(), ABFS: AzureStore(), **dict.fromkeys(WEB, WebStore())}


def store_of(path: str) -> Store:
    """The store of a file.

    Raises:
      ValueError: There is none for its scheme.
    """
    if "://" not in path:
        return _LOCAL
    scheme = path[: path.index("://") + 3]
    if scheme not in _STORES:
        raise ValueError(
            "expected a file on this machine, gs://bucket/name, s3://bucket/name, abfs://container/name or a web address; "
            "copy the file to one of these"
        )
    return _STORES[scheme]


def generation_of(path: str) -> str:
    """The generation of a file or object, as in a listing; empty if it is missing, or has none."""
    if "://" not in path:
        with contextlib.suppress(OSError):
            return _LOCAL.look_up(path).generation
        return ""
    from google.api_core.exceptions import NotFound

    with contextlib.suppress(NotFound):
        return retried(store_of(path).look_up)(path).generation
    return ""
