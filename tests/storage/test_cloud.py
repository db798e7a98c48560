"""What this project takes from inside Cloud Storage's client; an upgrade that changes it fails here by name."""

import contextlib
import gc
import os
import time
from urllib.parse import urlsplit

import psutil
import requests

from pipeline.storage import cloud
from pipeline.storage.cloud import server_times, storage_client


def test_server_times_are_the_dates_of_the_answers(strict_gcs_bucket):
    """`Client._http` is a session of requests, whose hooks get each answer."""
    strict_gcs_bucket.blob("a").upload_from_string(b"")
    with storage_client() as client:
        with server_times(client) as times:
            assert times == []
            assert client.bucket(strict_gcs_bucket.name).get_blob("a")
        count = len(times)
        assert count and all(abs(each - time.time()) < 3600 for each in times)
        client.bucket(strict_gcs_bucket.name).get_blob("a")
        assert len(times) == count, "the hook ends with its block"
        assert isinstance(client._http, requests.Session)


def test_clients_that_nobody_needs_any_more_are_closed(strict_gcs_bucket, monkeypatch):
    """As after an outage, when many calls hung side by side; their servers close the connections."""
    strict_gcs_bucket.blob("a").upload_from_string(b"")
    monkeypatch.setattr(cloud, "_idle", [])  # other tests' clients
    port = urlsplit(os.environ["STORAGE_EMULATOR_HOST"]).port

    def connections():
        open_ones = [each for each in psutil.Process().net_connections("tcp") if each.status == "ESTABLISHED"]
        return sum(each.raddr.port == port for each in open_ones)

    def look(client):
        assert client.bucket(strict_gcs_bucket.name).get_blob("a")

    gc.collect()  # else clients of other tests may close their connections in between
    before = connections()
    with contextlib.ExitStack() as lent:
        for client in [lent.enter_context(storage_client()) for _ in range(5)]:
            look(client)
    opened = connections() - before
    assert opened == 5, "one connection each"
    monkeypatch.setattr(cloud, "_IDLE_SECONDS", 0.0)
    with storage_client() as client:
        look(client)
    assert connections() - before <= 1
