"""Fetching one image: its bytes and version, or a reason that never needs a retry."""

import gzip
import os
import socket
from urllib.parse import parse_qs, urlsplit

import pytest
from requests import Session

from pipeline.failures import Failure
from pipeline.records import ImageRef
from pipeline.storage.fetch import fetch, open_file

LIMIT = 1000


def fetched(ref, *args, **how):
    """The content and the generation of an image."""
    found = fetch(ref, LIMIT, *args, **how)
    return found.content, found.ref.generation


def refusal(uri, **known):
    failure = fetch(ImageRef(str(uri), **known), LIMIT, retry_seconds=0.0)
    assert isinstance(failure, Failure) and "\n" not in failure.message
    return failure


@pytest.mark.parametrize("name", ["plain.jpg", "photo[1]*?.jpg", "ä\udcff.jpg", "a,b c.gz"])
def test_a_file_comes_with_a_version_that_changes_with_it(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"one")
    content, generation = fetched(ImageRef(str(path)))
    assert (content, generation) == (b"one", f"3-{path.stat().st_mtime_ns}")
    os.utime(path, ns=(1, 1))
    assert fetched(ImageRef(str(path))) == (b"one", "3-1")


def test_the_size_limit_is_exact_and_checked_before_reading(tmp_path):
    (tmp_path / "fits").write_bytes(bytes(LIMIT))
    reserved = []
    assert len(fetched(ImageRef(str(tmp_path / "fits"), size_bytes=1), reserved.append)[0]) == LIMIT
    assert reserved == [LIMIT], "memory is asked for by the size that the file has, not by the one it was listed with"
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)  # a terabyte that is not there
    error = refusal(tmp_path / "sparse")
    assert error.reason == "too_large_file" and "max_file_mb" in error.message


def make_socket(path):
    socket.socket(socket.AF_UNIX).bind(str(path))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(lambda path: None, "not_found", id="missing"),
        pytest.param(os.mkdir, "not_a_file", id="folder"),
        pytest.param(os.mkfifo, "not_a_file", id="fifo without a writer"),
        pytest.param(make_socket, "unreadable", id="socket"),
        pytest.param(lambda path: os.symlink("/dev/zero", path), "not_a_file", id="endless device"),
        pytest.param(lambda path: os.symlink(path, path), "unreadable", id="link to itself"),
        pytest.param(lambda path: os.symlink("gone", path), "not_found", id="dangling link"),
    ],
)
def test_what_is_no_readable_file_is_refused_without_waiting(tmp_path, monkeypatch, make, reason):
    monkeypatch.chdir(tmp_path)  # paths of sockets are short
    make("image.jpg")
    assert refusal("image.jpg").reason == reason


@pytest.mark.parametrize("uri", ["a\0b.jpg", "x" * 5000, "hdfs://host/a.jpg"], ids=["nul", "too long", "other storage"])
def test_a_uri_that_cannot_be_one_is_unreadable(uri):
    assert refusal(uri).reason == "unreadable"


@pytest.fixture
def sent(monkeypatch):
    """The addresses of all requests."""
    sent, send = [], Session.send
    monkeypatch.setattr(Session, "send", lambda self, request, **how: sent.append(request.url) or send(self, request, **how))
    return sent


@pytest.mark.parametrize(("size_bytes", "requests"), [(3, 1), (0, 2)], ids=["listed", "named by a message"])
def test_an_object_whose_size_is_known_takes_one_request(strict_gcs_bucket, sent, size_bytes, requests):
    """As on Cloud Storage the answer carries the generation; the other emulator's does not."""
    blob = strict_gcs_bucket.blob("a/b.jpg")
    blob.upload_from_string(b"one")
    content, generation = fetched(ImageRef(f"gs://{strict_gcs_bucket.name}/a/b.jpg", size_bytes=size_bytes))
    assert (content, generation) == (b"one", str(blob.generation))
    assert sum("/o/a%2Fb.jpg?" in url for url in sent) == requests  # a new client looks once at the bucket as well


def test_all_pieces_of_an_object_are_of_one_generation(strict_gcs_bucket, sent):
    """Else one that is replaced meanwhile would be spliced; the emulator ignores the condition, so the requests are checked."""
    blob = strict_gcs_bucket.blob("a.zip")
    blob.upload_from_string(bytes(9 << 20))
    with open_file(f"gs://{strict_gcs_bucket.name}/a.zip") as file:
        assert len(file.read(9 << 20)) == 9 << 20
        file.seek(-20, os.SEEK_END)
        assert len(file.read()) == 20
    pieces = [parse_qs(urlsplit(url).query) for url in sent if "alt=media" in url]
    assert {piece["ifGenerationMatch"][0] for piece in pieces} == {str(blob.generation)}


@pytest.mark.parametrize("name", ["a.jpg", "no-ending"])
def test_an_object_that_was_uploaded_gzipped_is_the_image(gcs_bucket, name):
    """`gcloud storage cp --gzip-in-flight-all` and web servers' tools store objects with `Content-Encoding: gzip`."""
    blob = gcs_bucket.blob(name)
    blob.content_encoding = "gzip"
    blob.upload_from_string(gzip.compress(b"pixels" * 100), content_type="image/jpeg")
    reserved = []
    content, generation = fetched(ImageRef(f"gs://{gcs_bucket.name}/{name}"), reserved.append)
    assert (content, generation) == (b"pixels" * 100, str(blob.generation))
    assert max(reserved) >= 600


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(gzip.compress(bytes(10 * LIMIT)), "too_large_file", id="bomb"),
        pytest.param(gzip.compress(bytes(10 * LIMIT))[:-4] + b"\1\0\0\0", "", id="bomb that lies about its size"),
        pytest.param(gzip.compress(b"pixels")[:-6], "", id="cut off"),
        pytest.param(b"\x1f\x8b", "", id="no gzip"),
    ],
)
def test_what_is_gzipped_takes_no_more_memory_than_an_image_may(tmp_path, content, reason):
    (tmp_path / "a.jpg").write_bytes(content)
    if reason:
        assert refusal(tmp_path / "a.jpg").reason == reason
    else:  # its decoder says that it is no image
        assert fetched(ImageRef(f"{tmp_path}/a.jpg"))[0] == content
