"""The stores whose objects have ETags for generations; their modules have the same functions."""

from __future__ import annotations

from typing import Any

from pipeline.storage import azure, s3

ETAG_STORES = {s3.S3: s3, azure.ABFS: azure}


def etag_store(path: str) -> Any:
    """The module that reads a path: `s3`, `azure`, or None.

    >>> etag_store("abfs://container/a.jpg").__name__, etag_store("a.jpg")
    ('pipeline.storage.azure', None)
    """
    return next((store for scheme, store in ETAG_STORES.items() if path.startswith(scheme)), None)
