"""The emulators as fixtures: Pub/Sub and new buckets of three object stores.

Where an emulator is not installed the tests that need it skip and say how to get it; with `CI_REQUIRE_EMULATORS=1` they fail.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipeline.detect import load_detector
from pipeline.storage import azure, s3
from tests.emulators import (
    S3_KEY,
    EmulatorMissing,
    PubSubEmulator,
    new_name,
    running_azurite,
    running_gcs_emulator,
    running_pubsub_emulator,
    running_s3_server,
    running_strict_gcs_emulator,
)


def _process(emulator: Callable[[], contextlib.AbstractContextManager[Any]], *, in_ci: bool) -> Any:
    """A fixture of a session, an emulator; `in_ci`: CI installs it, so that tests fail there where it is missing."""

    @pytest.fixture(scope="session")
    def process() -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            try:
                started = stack.enter_context(emulator())
            except EmulatorMissing as err:
                (pytest.fail if in_ci and os.environ.get("CI_REQUIRE_EMULATORS") == "1" else pytest.skip)(str(err))
            yield started

    return process


_pubsub_process = _process(running_pubsub_emulator, in_ci=True)
_gcs_process = _process(running_gcs_emulator, in_ci=True)
_strict_gcs_process = _process(running_strict_gcs_emulator, in_ci=False)
_s3_process = _process(running_s3_server, in_ci=False)
_azure_process = _process(running_azurite, in_ci=False)


@pytest.fixture
def pubsub_emulator(_pubsub_process: PubSubEmulator, monkeypatch: pytest.MonkeyPatch) -> PubSubEmulator:
    """The Pub/Sub emulator, named in the environment for the length of one test."""
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", _pubsub_process.host)
    return _pubsub_process


@pytest.fixture
def gcs_bucket(_gcs_process: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A new empty `google.cloud.storage.Bucket` on the emulator, which the environment names for the length of one test."""
    return new_bucket(_gcs_process, monkeypatch)


@pytest.fixture
def strict_gcs_bucket(_strict_gcs_process: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same on the emulator that honours preconditions."""
    return new_bucket(_strict_gcs_process, monkeypatch)


def new_bucket(url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A new empty bucket on the emulator at a URL, which the environment names from now on."""
    from apache_beam.internal.gcp import auth
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    forget_detectors()
    # else Beam looks for credentials for 25 s before it connects without; it has no option for that outside Dataflow
    monkeypatch.setattr(auth._Credentials, "_credentials_init", True)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # else the clients look for a metadata server, for seconds
    client = storage.Client(project="test-project", credentials=AnonymousCredentials())
    return client.create_bucket(new_name())


@pytest.fixture
def s3_bucket(_s3_process: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A new empty bucket, as boto3 has it, on the server, which the environment names for the length of one test."""
    import boto3

    forget_detectors()
    monkeypatch.setenv("AWS_ENDPOINT_URL", _s3_process)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, S3_KEY)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3._client_of.cache_clear()
    yield boto3.resource("s3").create_bucket(Bucket=new_name())
    s3._client_of.cache_clear()


@pytest.fixture(params=["gs", "s3", "abfs"])
def bucket(request: pytest.FixtureRequest) -> str:
    """The address of a new bucket or container on each object storage."""
    match request.param:
        case "gs":
            return f"gs://{request.getfixturevalue('strict_gcs_bucket').name}"
        case "s3":
            return f"s3://{request.getfixturevalue('s3_bucket').name}"
    return f"abfs://{request.getfixturevalue('azure_container').container_name}"


@pytest.fixture
def azure_container(_azure_process: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A new empty container on Azurite, which the environment names for the length of one test."""
    from azure.storage.blob import BlobServiceClient

    forget_detectors()
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", _azure_process)
    azure._client_of.cache_clear()
    yield BlobServiceClient.from_connection_string(_azure_process).create_container(new_name())
    azure._client_of.cache_clear()


def forget_detectors() -> None:
    """Closes the detectors that earlier tests share: the environment of their feeder processes names another emulator."""
    while load_detector._detectors:
        load_detector._detectors.popitem()[1].close()
