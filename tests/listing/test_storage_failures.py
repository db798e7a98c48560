"""Storage that fails: what may pass is tried again for a while, then is a dead letter; a store that stays away ends the job."""

import base64
import contextlib
import errno
import http.client
import http.server
import json
import urllib.parse

import apache_beam as beam
import google_crc32c
import pytest
import requests
import urllib3
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from google.api_core import exceptions
from google.auth import exceptions as auth

from pipeline.errors import AwayError
from pipeline.failures import ImageError
from pipeline.feed.read_image import CircuitBreaker
from pipeline.listing.read_images import ReadImages
from pipeline.records import ImageRef
from pipeline.runners.cause import raise_cause
from pipeline.storage import fetch as fetching
from pipeline.storage.cloud import google_error
from pipeline.storage.fetch import fetch, storage_failures
from pipeline.storage.store import is_transient_error, mapped
from pipeline.storage.stores import LocalStore
from tests.clock import Clock
from tests.emulators import free_ports
from tests.listing import test_web
from tests.listing.running import images_read, read_all, read_now, run
from tests.processes import served
from tests.storage.test_fetch import fetched

LIMIT = 1_000_000
web_server = test_web.server
CONTENT = b"content of the object"
CHECKSUM = base64.b64encode(google_crc32c.Checksum(CONTENT).digest()).decode()


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch):
    """Clients connect without looking for any, and none is left over from another test."""
    from apache_beam.internal.gcp import auth as beam_auth

    monkeypatch.setattr(beam_auth._Credentials, "_credentials_init", True)
    monkeypatch.setenv("NO_GCE_CHECK", "true")


class Storage(http.server.BaseHTTPRequestHandler):
    """As much of Cloud Storage's protocol as a download needs; fails as each request's script says, then works."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        if "/o/" not in self.path:
            self.answer(404, b"{}")  # the client looks at the bucket on a thread of its own
            return
        self.server.requests += 1
        failure = self.server.script.pop(0) if self.server.script else 200
        if self.server.broken and self.server.broken in self.path:
            failure = 503
        self.close_connection = failure in ("reset", "cut")
        if failure == "reset":
            self.connection.close()
        elif failure == "cut":
            self.answer(200, CONTENT[:5], length=len(CONTENT))
        elif failure == "corrupt":
            self.answer(200, CONTENT[::-1])
        elif failure != 200:
            self.answer(failure, b"{}")
        elif "alt=media" in self.path:
            self.answer(200, CONTENT)
        else:
            name = urllib.parse.unquote(self.path.rpartition("/o/")[2].partition("?")[0])
            self.answer(200, json.dumps({"name": name, "bucket": "b", "size": str(len(CONTENT)), "generation": "7"}).encode())

    def answer(self, status, content, length=None):
        self.send_response(status)
        self.send_header("Content-Length", str(length or len(content)))
        self.send_header("X-Goog-Generation", "7")
        self.send_header("X-Goog-Hash", "crc32c=" + CHECKSUM)
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def storage(monkeypatch):
    """Starts a storage with a script; the environment names it."""
    with contextlib.ExitStack() as servers:

        def start(*script):
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Storage)
            server.script, server.broken, server.requests = list(script), "", 0
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{servers.enter_context(served(server))}")
            return server

        yield start


@pytest.fixture
def dead_storage(monkeypatch):
    """A storage that is gone: connections are refused."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{free_ports(1)[0]}")


@pytest.mark.parametrize("failure", [429, 408, 500, 502, 503, 504, "reset", "cut", "corrupt"])
@pytest.mark.parametrize("listed", [0, len(CONTENT)], ids=["unknown size", "listed"])
def test_what_passes_by_itself_is_tried_again(storage, failure, listed):
    """Once or twice, while the object is looked at or read: its content comes, whole."""
    server = storage(failure, failure)
    assert fetched(ImageRef("gs://b/a.jpg", size_bytes=listed), retry_seconds=30) == (CONTENT, "7")
    assert server.requests >= 3


@pytest.mark.parametrize(
    ("failure", "reason"), [(400, "unreadable"), (401, "storage_unavailable"), (403, "permission_denied"), (404, "not_found")]
)
def test_what_does_not_pass_is_not_tried_again(storage, failure, reason):
    server = storage(failure)
    failure = fetch(ImageRef("gs://b/a.jpg"), LIMIT, retry_seconds=30)
    assert (failure.reason, server.requests) == (reason, 1)


def test_an_object_larger_than_it_was_listed_comes_whole(storage):
    """And no more of it is taken than there was room for when it was asked."""
    storage()
    reserved = []
    assert fetched(ImageRef("gs://b/a.jpg", size_bytes=3), reserved.append) == (CONTENT, "7")
    assert reserved == [3, len(CONTENT)]
    assert "max_file_mb" in fetch(ImageRef("gs://b/a.jpg", size_bytes=3), 10).message


@pytest.mark.parametrize(
    ("err", "passing", "reason"),
    [
        (exceptions.RetryError("60 s", exceptions.ServiceUnavailable("down")), True, "storage_unavailable"),
        (auth.TransportError("no route"), True, "storage_unavailable"),
        (auth.RefreshError("try later", retryable=True), True, "storage_unavailable"),
        (auth.RefreshError("revoked"), False, "storage_unavailable"),
        (auth.DefaultCredentialsError("none found"), False, "storage_unavailable"),
        (requests.Timeout("60 s"), True, "storage_unavailable"),
        (requests.exceptions.ChunkedEncodingError("cut"), True, "storage_unavailable"),
        (requests.exceptions.InvalidURL("no host"), False, "unreadable"),
        (urllib3.exceptions.ProtocolError("cut"), True, "storage_unavailable"),
        (http.client.IncompleteRead(b"half"), True, "storage_unavailable"),
        (TimeoutError("slow"), True, "storage_unavailable"),
        (OSError(errno.EMFILE, "too many open files"), True, "storage_unavailable"),
        (OSError(errno.ESTALE, "stale file handle"), True, "storage_unavailable"),
        (OSError(errno.EIO, "input/output error"), False, "unreadable"),
        (RuntimeError("a client that we do not know"), False, "unreadable"),
        (PermissionError("closed"), False, "permission_denied"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_each_failure_is_known_as_what_it_is(err, passing, reason):
    with pytest.raises(Exception) as raised, mapped(google_error):
        raise err
    assert is_transient_error(raised.value) is passing
    with pytest.raises(ImageError) as caught, storage_failures("gs://b/a.jpg"):
        raise raised.value
    assert caught.value.failure.reason == reason
    assert str(caught.value).startswith("gs://b/a.jpg ") and "\n" not in str(caught.value)


def test_without_storage_each_image_there_is_a_dead_letter_and_the_others_are_read(dead_storage, tmp_path, monkeypatch):
    """Objects and TFRecord files of a storage that is gone, between local files."""
    monkeypatch.setattr(fetching, "RETRY_SECONDS", 0.2)
    (tmp_path / "here.jpg").write_text("here")
    lines = ["gs://b/1.jpg", str(tmp_path / "here.jpg"), "gs://b/2.jpg", "gs://b/3.tfrecord"]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    got = run(lambda pipeline: images_read(pipeline, ReadImages([f"{tmp_path}/list.txt"]), retry_seconds=0.2))
    assert [image.content for image in got["images"]] == [b"here"]
    dead = sorted((letter.ref.uri, letter.stage, letter.reason) for letter in got["dead"])
    assert dead == [(uri, "read", "storage_unavailable") for uri in sorted(lines) if uri.startswith("gs://")]


def test_a_job_whose_store_is_away_has_exit_code_1_and_one_line(dead_storage):
    """The images behind it are no dead letters: nothing is wrong with them, and the same command works once the store is back."""
    with pytest.raises(AwayError, match=r"^storage is away, .*: gs://b/\d+.jpg cannot be read now") as caught:
        try:
            with beam.Pipeline(runner=FnApiRunner()) as pipeline:
                refs = pipeline | beam.Create([ImageRef(f"gs://b/{n}.jpg") for n in range(20)], reshuffle=False)
                _ = refs | beam.Map(lambda ref: read_now(ref, LIMIT, CircuitBreaker(0.0, 0.0)))
        except Exception as err:  # noqa: BLE001  runners raise what they like
            raise_cause(err)
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)


def test_a_web_server_that_stays_away_ends_no_job(web_server):
    """Lists from the web name many servers, and some are gone for good."""
    breaker = CircuitBreaker(0.0, 0.0)
    letters = [read_now(ImageRef(f"{web_server}/status/500?{n}"), LIMIT, breaker) for n in range(20)]
    assert [letter.reason for letter in letters] == ["storage_unavailable"] * 20


def test_a_file_larger_than_memory_is_a_dead_letter_and_does_not_fail_its_bundle_again_and_again(monkeypatch):
    """Any other image is read once memory is there."""

    def download(_store, _file, _most_bytes, reserve):
        reserve(size)
        raise MemoryError

    monkeypatch.setattr(LocalStore, "download", download)
    size = 1 << 60
    letter = read_now(ImageRef("a.jpg"), LIMIT, CircuitBreaker())
    assert (letter.reason, "which do not fit into memory" in letter.message) == ("unreadable", True)
    size = 1
    with pytest.raises(MemoryError):
        read_now(ImageRef("a.jpg"), LIMIT, CircuitBreaker())


def of_messages(*uris):
    return [ImageRef(uri, message_id="m", size_bytes=len(CONTENT)) for uri in uris]


def test_what_always_fails_does_not_hold_its_neighbours_in_a_stream(web_server, storage):
    """Anybody may name such a web address in a message; a store that answers others is not waited for."""
    storage().broken = "broken.jpg"
    on_web = of_messages(*(f"{web_server}/{path}" for path in ("status/500", *(f"ok/{n}.jpg" for n in range(20)))))
    objects = of_messages(*(f"gs://b/{name}.jpg" for name in ("broken", *range(20))))
    for refs in (on_web, objects):
        found = read_all(refs, LIMIT, CircuitBreaker(0.2))
        assert [getattr(image, "reason", "read") for image in found] == ["storage_unavailable"] + ["read"] * 20


@pytest.mark.slow
def test_a_store_that_answers_nobody_is_waited_for_in_a_stream(storage):
    """Also for longer than one image is retried, and where a batch job would end."""
    storage(*[503] * 3)
    (image,) = read_all(of_messages("gs://b/a.jpg"), LIMIT, CircuitBreaker(0.2, 0.0))
    assert image.content == CONTENT


def test_a_store_is_away_when_it_answered_nobody_for_long_and_is_back_with_the_first_answer():
    """Each store for itself; a web server that is away costs its other images one try each."""
    clock = Clock()
    breaker = CircuitBreaker(60.0, 600.0, clock=clock)
    for uri in ("gs://b/a.jpg", "https://h/a.jpg"):
        breaker.failed(ImageRef(uri), "down")
        clock.now += 599.0
        breaker.failed(ImageRef(uri), "down")
        breaker.succeeded("s3://b/a.jpg")
        assert not breaker.is_away(uri)
        clock.now += 1.0
        assert breaker.is_away(uri) and not breaker.is_away("/a.jpg")
    assert [breaker.retry_seconds(uri) for uri in ("gs://b/a.jpg", "https://h/a.jpg", "http://h/a.jpg")] == [60.0, 0.0, 60.0]
    breaker.succeeded("gs://b/b.jpg")
    assert not breaker.is_away("gs://b/a.jpg") and breaker.is_away("https://h/a.jpg")
