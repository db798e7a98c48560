"""Images on Azure Blob Storage: listed by folder and glob, read with their ETag, refused with the reasons of other storage."""

import os
import re
import sys

import pytest

from pipeline.errors import InputError
from pipeline.failures import ImageError
from pipeline.read.fetch import StorageUnavailableError, fetch, look_up
from pipeline.read.list_images import check_inputs, list_images
from pipeline.records import ImageRef
from pipeline.storage import azure, s3
from tests.emulators import free_ports
from tests.read.test_s3 import LIMIT, NAMES, refusal


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("in", ["a.jpg", "d/b.png", "d/e/c.jpg", "dd/f.jpg", "ä b+%20.jpg"]),
        ("in/*", ["a.jpg", "ä b+%20.jpg"]),
        ("in/*/*.jpg", ["dd/f.jpg"]),
        ("in/d/b.png", ["d/b.png"]),
        ("in/d", ["d/b.png", "d/e/c.jpg"]),
        ("in/absent/*", []),
    ],
)
def test_folders_globs_and_names_are_listed_with_size_and_etag(azure_container, pattern, found):
    for name in NAMES:
        azure_container.upload_blob(f"in/{name}", f"content of {name}".encode())
    place = f"abfs://{azure_container.container_name}"
    listed = list(list_images([f"{place}/{pattern}"]))
    assert sorted(ref.uri for ref in listed) == [f"{place}/in/{name}" for name in found]
    for ref in listed:
        content, generation = fetch(ref, LIMIT)
        assert content.decode() == f"content of {ref.uri.partition('/in/')[2]}"
        assert generation == ref.generation == look_up(ref) != ""


def test_what_cannot_be_read_has_the_reason_of_other_storage(azure_container):
    place = f"abfs://{azure_container.container_name}"
    azure_container.upload_blob("large.jpg", bytes(LIMIT + 1))
    assert refusal(f"{place}/gone.jpg").reason == "not_found"
    assert refusal("abfs://no-such-container/a.jpg").reason == "not_found"
    assert refusal(f"{place}/large.jpg").reason == "too_large_file"


def test_an_open_object_that_is_replaced_gives_an_error_not_parts_of_two(azure_container):
    azure_container.upload_blob("a", bytes(s3._BUFFER_BYTES + 10))
    with azure.open_object(f"abfs://{azure_container.container_name}/a") as file:
        assert file.read(10) == bytes(10)
        azure_container.upload_blob("a", b"x" * (s3._BUFFER_BYTES + 10), overwrite=True)
        with pytest.raises(Exception, match="condition"):
            file.read()


def test_wrong_credentials_and_no_answer_have_the_reasons_of_other_storage(azure_container, monkeypatch):
    said, name = os.environ["AZURE_STORAGE_CONNECTION_STRING"], f"abfs://{azure_container.container_name}/a.jpg"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", said.replace("AccountKey=", "AccountKey=AAAA"))
    azure._client_of.cache_clear()
    assert refusal(name).reason == "permission_denied"
    (port,) = free_ports(1)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", re.sub(r"1:\d+/", f"1:{port}/", said))
    azure._client_of.cache_clear()
    assert isinstance(refusal(name), StorageUnavailableError)


def test_without_the_library_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    azure._client_of.cache_clear()
    with pytest.raises(InputError, match=r"pip install 'hybrid-detection-pipeline\[azure\]'"):
        check_inputs({"abfs://c/": ["abfs://c/"]})


def test_credentials_go_to_no_other_host():
    with pytest.raises(ImageError, match=r"evil\.example is no storage account"):
        fetch(ImageRef("abfs://c@evil.example/a.jpg"), LIMIT, retry_seconds=0.0)
