"""What this project takes from inside Cloud Storage's client; an upgrade that changes it fails here by name."""

import time

import requests

from pipeline.storage import cloud
from pipeline.storage.cloud import server_times, storage_client


def test_server_times_are_the_dates_of_the_answers(strict_gcs_bucket):
    """`Client._http` is a session of requests, whose hooks get each answer."""
    strict_gcs_bucket.blob("a").upload_from_string(b"")
    bucket = storage_client().bucket(strict_gcs_bucket.name)
    with server_times(storage_client()) as times:
        assert times == []
        assert bucket.get_blob("a")
    count = len(times)
    assert count and all(abs(each - time.time()) < 3600 for each in times)
    bucket.get_blob("a")
    assert len(times) == count, "the hook ends with its block"
    assert isinstance(storage_client()._http, requests.Session)
    assert storage_client()._http.get_adapter("https://storage.googleapis.com")._pool_maxsize == cloud._CONNECTIONS
