"""Images on Amazon S3 and Azure Blob Storage: listed by folder and glob, read with their ETag, refused with usual reasons."""

import os
import re
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipeline import run
from pipeline.commands.reconcile import compare
from pipeline.config import load_config
from pipeline.detect.load_model import name_and_version
from pipeline.errors import InputError
from pipeline.listing.list_images import check_inputs, list_images
from pipeline.results.completion import RowVersion
from pipeline.storage import azure, s3
from pipeline.storage.store import _BUFFER_BYTES
from pipeline.storage.stores import store_of
from tests.conftest import write_bright_image
from tests.emulators import free_ports
from tests.launch.jobs import rows_of
from tests.listing.test_archives import write
from tests.listing.test_videos import frames, write_video
from tests.storage.test_fetch import LIMIT, fetched, refusal

NAMES = ["a.jpg", "d/b.png", "d/e/c.jpg", "d/.hidden/x.jpg", "d/notes.md", "ä b+%20.jpg", "dd/f.jpg"]


class Store(NamedTuple):
    """A new bucket or container on an emulator; `put` writes an object."""

    url: str
    module: Any
    put: Callable[[str, bytes], object]


@pytest.fixture(params=["s3_bucket", pytest.param("azure_container", marks=pytest.mark.matrix)])
def store(request):
    made = request.getfixturevalue(request.param)
    if request.param == "s3_bucket":
        return Store(f"s3://{made.name}", s3, lambda name, content: made.put_object(Key=name, Body=content))
    return Store(f"abfs://{made.container_name}", azure, lambda name, content: made.upload_blob(name, content, overwrite=True))


LISTED = {
    "in": ["a.jpg", "d/b.png", "d/e/c.jpg", "dd/f.jpg", "ä b+%20.jpg"],
    "in/*": ["a.jpg", "ä b+%20.jpg"],
    "in/**/*.jpg": ["a.jpg", "d/.hidden/x.jpg", "d/e/c.jpg", "dd/f.jpg", "ä b+%20.jpg"],
    "in/d/b.png": ["d/b.png"],
    "in/d": ["d/b.png", "d/e/c.jpg"],
    "in/absent/*": [],
}


def test_folders_globs_and_names_are_listed_with_size_and_etag(store):
    for name in NAMES:
        store.put(f"in/{name}", name.encode())
    for pattern, found in LISTED.items():
        listed = list(list_images([f"{store.url}/{pattern}"]))
        assert sorted(ref.uri for ref in listed) == [f"{store.url}/in/{name}" for name in found]
        for ref in listed:
            object_there = store_of(ref.uri).look_up(ref.uri)
            assert (ref.size_bytes, ref.generation) == (object_there.size_bytes, object_there.generation)
            assert ref.generation
            assert fetched(ref) == (ref.uri.partition("/in/")[2].encode(), ref.generation)


def test_a_listing_of_several_pages_is_whole(s3_bucket):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: s3_bucket.put_object(Key=f"{number:04}.jpg", Body=b"x"), range(1003)))
    assert len(list(list_images([f"s3://{s3_bucket.name}"]))) == 1003


def test_what_cannot_be_read_has_the_reason_of_other_storage(store):
    store.put("large.jpg", bytes(LIMIT + 1))
    assert refusal(f"{store.url}/gone.jpg").reason == "not_found"
    assert refusal(f"{store.url.partition('://')[0]}://no-such-bucket-here/a.jpg").reason == "not_found"
    assert refusal(f"{store.url}/large.jpg").reason == "too_large_file"


def test_a_server_that_does_not_answer_is_a_transient_failure(store, monkeypatch):
    (port,) = free_ports(1)
    for name in ("AWS_ENDPOINT_URL", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.setenv(name, re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", os.environ.get(name, "")))
    store.module._client_of.cache_clear()
    assert refusal(f"{store.url}/a.jpg").reason == "storage_unavailable"


def test_without_credentials_an_image_is_a_dead_letter_and_an_input_an_error_at_once(s3_bucket, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    s3._client_of.cache_clear()
    assert refusal("s3://bucket/a.jpg").reason == "permission_denied"
    with pytest.raises(InputError, match=r"input s3://bucket/: cannot be listed: .*Unable to locate credentials"):
        check_inputs({"s3://bucket/": ["s3://bucket/"]})


def test_wrong_credentials_for_azure_are_a_refused_permission(azure_container, monkeypatch):
    said = os.environ["AZURE_STORAGE_CONNECTION_STRING"]
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", said.replace("AccountKey=", "AccountKey=AAAA"))
    azure._client_of.cache_clear()
    assert refusal(f"abfs://{azure_container.container_name}/a.jpg").reason == "permission_denied"


def test_credentials_for_azure_go_to_no_other_host():
    assert "evil.example is no storage account" in refusal("abfs://c@evil.example/a.jpg").message


@pytest.mark.parametrize(
    ("module", "library", "said"),
    [
        (s3, "boto3", "s3:// is read by boto3: pip install 'hybrid-detection-pipeline[s3]'"),
        (azure, "azure.identity", "abfs:// is read by azure-storage-blob: pip install 'hybrid-detection-pipeline[azure]'"),
        (azure, "", "no storage account: set AZURE_STORAGE_CONNECTION_STRING"),
    ],
)
def test_without_its_library_or_an_account_one_line_says_what_to_do(module, library, said, monkeypatch):
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    module._client_of.cache_clear()
    url = "s3://b/" if module is s3 else "abfs://b/"
    assert refusal(f"{url}a.jpg").message.startswith(f"{url}a.jpg cannot be read: {said}")
    with pytest.raises(InputError, match=re.escape(f"input {url}: cannot be listed: {said}")):
        check_inputs({url: [url]})


def test_archives_and_videos_are_read_there_piece_by_piece(store, tmp_path):
    store.put("a.zip", write(tmp_path / "a.zip", {"x.jpg": b"x" * 100}).read_bytes())
    store.put("a.mp4", Path(write_video(tmp_path / "a.mp4")).read_bytes())
    assert frames(f"{store.url}/a.mp4") == [("0.000", 0), ("1.000", 25)]
    with store_of(store.url).open(f"{store.url}/a.zip") as file, zipfile.ZipFile(file) as archive:
        assert archive.read("x.jpg") == b"x" * 100


def test_an_open_object_that_is_replaced_gives_an_error_not_parts_of_two(store):
    store.put("a", bytes(_BUFFER_BYTES + 10))
    with store_of(store.url).open(f"{store.url}/a") as file:
        assert file.read(10) == bytes(10)
        store.put("a", b"x" * (_BUFFER_BYTES + 10))
        with pytest.raises(Exception, match="condition"):
            file.read()


def test_a_job_reads_adds_and_reconciles_images_there(store, tmp_path, bright_model, capsys):
    """A replaced object is another image generation, also within the same second."""
    for number in range(3):
        write_bright_image(tmp_path / f"{number}.png", (64, 48), (10, 10 + number, 30, 30))
        store.put(f"in/{number}.png", (tmp_path / f"{number}.png").read_bytes())
    pattern, out = f"{store.url}/in", tmp_path / "out"

    job = ["--input", pattern, "--output", str(out), "--model", bright_model]
    assert run.main(job) == 0, capsys.readouterr().err
    config = load_config([], {"input": [pattern], "output": str(out), "model.path": bright_model})
    version = RowVersion.of(config.as_dict(), name_and_version(config.model, config.detect.engine))
    assert compare(config, str(out), version, {})[0] == {"done": 3}
    store.put("in/0.png", (tmp_path / "2.png").read_bytes())
    assert compare(config, str(out), version, {})[0] == {"done": 2, "stale": 1}
    assert run.main(job) == 0, capsys.readouterr().err
    assert sorted(row["image"]["uri"] for row in rows_of(out)) == [f"{pattern}/{number}.png" for number in (0, 0, 1, 2)]
