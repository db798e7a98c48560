"""Images at web addresses, from a server that behaves well, badly, or not at all."""

import gzip
import http.server
import re
import time
from typing import ClassVar

import pytest

from pipeline.errors import InputError
from pipeline.failures import Failure
from pipeline.listing.list_images import check_inputs, list_images
from pipeline.records import ImageRef
from pipeline.storage import web
from pipeline.storage.fetch import fetch
from pipeline.storage.stores import generation_of
from tests.listing.test_read_images import read
from tests.processes import served, wait_until
from tests.shard_rows import detected, write_rows

CONTENT = bytes(range(256)) * 2000
LIMIT = 1_000_000


class Server(http.server.BaseHTTPRequestHandler):
    """Answers a path by its first part; `asked` has each request."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []
    images: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        name = self.path[1:].partition("?")[0].partition("/")[0]
        getattr(self, f"_{name}", self._image)()

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send(self, code: int, content: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        if length != -1:
            self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def _image(self) -> None:
        content = self.images.get(self.path)
        self._send(200 if content else 404, content or b"", ETag=f'"{len(content or b"")}"')

    def _ok(self) -> None:
        self._send(200, CONTENT, ETag='W/"one"', Set_Cookie="a=b")

    def _modified(self) -> None:
        self._send(200, CONTENT, Last_Modified="Mon, 23 Nov 2026 12:00:00 GMT")

    def _status(self) -> None:
        self._send(int(re.search(r"/(\d{3})", self.path)[1]))

    def _getonly(self) -> None:
        refused = 403 if "signed" in self.path else 405
        self._send(refused if self.command == "HEAD" else 200, CONTENT, ETag='"one"')

    def _busy(self) -> None:
        """Unavailable at first."""
        self._send(503 if self.asked.count(f"GET {self.path}") < 2 else 200, CONTENT)

    def _cut(self) -> None:
        """A part of it at first."""
        self.close_connection = True
        first = self.asked.count(f"GET {self.path}") < 2
        self._send(200, CONTENT[:1000] if first else CONTENT, length=len(CONTENT))

    def _unbounded(self) -> None:
        """Content without end; only the reader's limit ends it."""
        self._send_until_closed(CONTENT, length=-1)

    def _drip(self) -> None:
        """A byte now and then, as long as somebody reads."""
        self._send_until_closed(b"x", length=len(CONTENT), pause_seconds=0.02)

    def _send_until_closed(self, content: bytes, length: int, pause_seconds: float = 0.0) -> None:
        self.close_connection = True
        self._send(200, length=length)
        try:
            while self.command == "GET":
                self.wfile.write(content)
                time.sleep(pause_seconds)
        except OSError:
            self.asked.append("closed")

    def _unsized(self) -> None:
        self.close_connection = True
        self._send(200, CONTENT, length=-1)

    def _zipped(self) -> None:
        self._send(200, gzip.compress(CONTENT), Content_Encoding="gzip")

    def _to(self) -> None:
        self._send(302, Location=self.path.removeprefix("/to/").replace("?of=", "?to="))

    def log_message(self, *_: object) -> None:
        pass


class Listening(http.server.ThreadingHTTPServer):
    """With room for all connections of a job; the system resets those beyond."""

    request_queue_size = 128


@pytest.fixture
def server():
    Server.asked.clear()
    with served(Listening(("127.0.0.1", 0), Server)) as port:
        yield f"http://127.0.0.1:{port}"


def refusal(uri):
    failure = fetch(ImageRef(uri), LIMIT, retry_seconds=0)
    assert isinstance(failure, Failure) and "\n" not in failure.message
    return failure


@pytest.mark.parametrize(
    ("path", "generation"),
    [
        ("/ok/a.jpg", "one"),
        ("/ok/a.jpg?size=[1]&name=*", "one"),
        ("/modified", "Mon, 23 Nov 2026 12:00:00 GMT"),
        ("/getonly", "one"),
        ("/getonly?signed", "one"),
        ("/unsized", ""),
        ("/zipped", ""),
        ("/busy", ""),
        ("/cut", ""),
        ("/to//ok/b.jpg", "one"),
    ],
)
def test_content_comes_whole_with_the_generation_that_a_look_says(server, path, generation):
    ref = ImageRef(server + path)
    found = fetch(ref, LIMIT, retry_seconds=30)
    assert (found.content, found.ref.generation) == (CONTENT, generation)
    assert generation_of(ref.uri) == generation


@pytest.mark.parametrize(
    ("path", "reason", "said"),
    [
        ("/status/404", "not_found", "does not exist"),
        ("/status/403", "permission_denied", "may not be read"),
        ("/status/410", "unreadable", "410"),
        ("/status/204", "unreadable", "204"),
        ("/status/429", "storage_unavailable", "429"),
        ("/status/500", "storage_unavailable", "500"),
        ("/unbounded", "too_large_file", "expected at most 1 MB"),
        ("/to/file:///etc/passwd", "unreadable", "redirects to file:///etc/passwd"),
        ("/to/http://localhost:1/x", "unreadable", "redirects to http://localhost:1/x"),
        ("/to//to//to//to//to//to//to//ok", "unreadable", "redirects more than 5 times"),
        ("/to/http://[", "unreadable", "cannot be read"),
        ("http://127.0.0.1:1/a.jpg", "storage_unavailable", "Connection refused"),
    ],
)
def test_what_a_server_refuses_is_one_line_with_its_reason_and_without_the_signature(server, path, reason, said):
    refused = refusal(f"{server if path[0] == '/' else ''}{path}?of=s3cret")
    assert (refused.reason, said in refused.message, "s3cret" in refused.message) == (reason, True, False), refused


def test_memory_is_reserved_before_it_is_taken(server):
    reserved: list[int] = []
    fetch(ImageRef(f"{server}/ok"), LIMIT, reserved.append)
    assert reserved == [len(CONTENT)]
    reserved.clear()
    fetch(ImageRef(f"{server}/unsized"), LIMIT, reserved.append)
    assert reserved == sorted(reserved) and len(reserved) > 1 and reserved[-1] >= len(CONTENT)


def test_a_drip_of_bytes_ends_at_the_deadline(server, monkeypatch):
    monkeypatch.setattr(web, "_DEADLINE_SECONDS", 0.2)
    assert refusal(f"{server}/drip").reason == "storage_unavailable"
    wait_until(lambda: "closed" in Server.asked)


def test_cookies_and_passwords_of_the_user_are_not_sent(server, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("default login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    sent = []
    monkeypatch.setattr(Server, "_note", lambda self: sent.extend(self.headers) or self._ok(), raising=False)
    for _ in range(2):
        fetch(ImageRef(f"{server}/note"), LIMIT)
    assert "User-Agent" in sent and not {"Cookie", "Authorization"} & {*sent}


def test_an_address_is_one_input_and_web_servers_list_nothing(server):
    uri = f"{server}/ok/a.jpg?x=[*"[:-1]
    assert [*list_images([uri])] == [ImageRef(uri, "one", len(CONTENT))]
    unlisted = {"/status/404": "no file matches", "/*.jpg": "web servers list no files", "/status/403": "cannot be listed"}
    for wrong, said in unlisted.items():
        with pytest.raises(InputError, match=said):
            check_inputs({wrong: [server + wrong]})


def test_of_a_manifest_of_addresses_what_has_changed_is_read_again(server, tmp_path):
    output, uris = f"{tmp_path}/out", [f"{server}/{name}.png" for name in "ab"]
    (tmp_path / "list.txt").write_text("\n".join(uris))
    Server.images.update({f"/{name}.png": b"image" for name in "ab"})
    write_rows(output, [detected(uri, generation_of(uri)) for uri in uris])
    Server.images["/b.png"] += b" of another size"
    Server.asked.clear()
    assert read([f"{tmp_path}/list.txt"], output) == (["b.png"], 2, 1, 1)
    assert "GET /a.png" not in Server.asked
