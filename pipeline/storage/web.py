"""Images at web addresses, `http://` and `https://`: one GET an image, with a deadline for its content.

The ETag (https://www.rfc-editor.org/rfc/rfc9110#name-etag) is the generation, else the time of the last modification.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import os
import time
from collections.abc import Iterator, Sequence
from http.cookiejar import DefaultCookiePolicy
from typing import Any, NoReturn
from urllib.parse import urljoin, urlsplit

from pipeline.failures import ImageError
from pipeline.storage.store import RETRY_SECONDS, FoundFile, Reserve, Store, check_size, connection_error, error_of_status, mapped

WEB = ("http://", "https://")
_DEADLINE_SECONDS = 120.0
_TIMEOUTS_SECONDS = (10.0, 30.0)  # to connect, and between two pieces of an answer
_MOST_REDIRECTS = 5
_PIECE_BYTES = 1 << 18
# an address that is signed for GET alone is forbidden for HEAD
_NO_HEAD = (http.client.METHOD_NOT_ALLOWED, http.client.NOT_IMPLEMENTED, http.client.FORBIDDEN)


def is_web(uri: str) -> bool:
    """Whether a URI is a web address."""
    return uri.startswith(WEB)


def without_query(uri: str) -> str:
    """An address for messages; signatures and tokens stand in its query."""
    address, mark, query = uri.partition("?")
    return f"{address}?***" if query else address + mark


class WebStore(Store):
    """Web servers, which list nothing and give whole files."""

    def look_up(self, path: str, generation: str = "") -> FoundFile:
        with _answer("HEAD", path, _NO_HEAD) as answer:
            if answer.status_code not in _NO_HEAD:
                return FoundFile(path, _size(answer), _generation(answer))
        with _answer("GET", path) as answer:
            return FoundFile(path, _size(answer), _generation(answer))

    def download(self, file: FoundFile, most_bytes: float, reserve: Reserve) -> tuple[bytes, str]:
        """The content; raises `TimeoutError` where it comes too slowly."""
        with _answer("GET", file.path) as answer:
            room, name, generation = _size(answer) or _PIECE_BYTES, without_query(file.path), _generation(answer)
            check_size(FoundFile(name, room, generation), most_bytes, reserve)
            end = time.monotonic() + _DEADLINE_SECONDS
            content = io.BytesIO()
            # `iter_content` would wait until a piece is full, however slowly its bytes come
            for piece in iter(lambda: answer.raw.read1(_PIECE_BYTES, decode_content=True), b""):
                if time.monotonic() > end:
                    raise TimeoutError(f"not complete after {_DEADLINE_SECONDS:.0f} s")
                content.write(piece)
                check_size(FoundFile(name, content.tell(), generation), most_bytes)
                if content.tell() > room:  # the server did not say how long the answer is
                    room = 2 * content.tell()
                    reserve(room)
            return content.getvalue(), generation

    def open(self, path: str, generation: str = "", retry_seconds: float = RETRY_SECONDS) -> NoReturn:
        """Opens nothing: servers need not answer with parts of a file."""
        raise ImageError("read", "unreadable", f"{path}: only images are read from web addresses; copy the file first")


@contextlib.contextmanager
def _answer(method: str, uri: str, also: Sequence[int] = ()) -> Iterator[Any]:
    """A good answer, or one with a status of `also`, whose content has not been read.

    Redirects are followed on the same host only. Whoever may name addresses of one host could else reach all others.
    """
    with mapped(connection_error):
        yield from _answers(method, uri, also)


def _answers(method: str, uri: str, also: Sequence[int]) -> Iterator[Any]:
    where = uri
    for _ in range(_MOST_REDIRECTS + 1):
        answer = _session(os.getpid()).request(method, where, stream=True, allow_redirects=False, timeout=_TIMEOUTS_SECONDS)
        with answer:
            if not answer.is_redirect:
                if answer.status_code not in (http.client.OK, *also):
                    raise error_of_status(answer.status_code, f"{method}: {answer.status_code} {answer.reason}")
                yield answer
                return
            before, where = where, urljoin(where, answer.headers["Location"])
            if not _same_host(before, where):
                raise ValueError(f"it redirects to {without_query(where)[:300]}; name that address instead")
    raise ValueError(f"it redirects more than {_MOST_REDIRECTS} times")


def _same_host(uri: str, other: str) -> bool:
    """Whether a redirect stays on the host; it may change from http to https.

    >>> [_same_host("http://a/x", to) for to in ("http://a/y", "https://a/x", "http://a:81/x", "http://b/x", "file:///x")]
    [True, True, False, False, False]
    """
    before, after = urlsplit(uri), urlsplit(other)
    upgrade = (before.scheme, after.scheme) == ("http", "https")
    return before.netloc == after.netloc and (before.scheme == after.scheme or upgrade)


@functools.lru_cache(maxsize=1)
def _session(_process: int) -> Any:
    """A session without cookies and without passwords of `.netrc`; connections belong to one process."""
    import requests

    session = requests.Session()
    session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    session.auth = lambda request: request
    session.headers.update({"Accept": "image/*, */*;q=0.5", "Accept-Encoding": "identity", "User-Agent": "detect-objects"})
    for scheme in WEB:
        session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=64))
    return session


def _size(answer: Any) -> int:
    length = answer.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() and "Content-Encoding" not in answer.headers else 0


def _generation(answer: Any) -> str:
    headers = answer.headers
    return str(headers.get("ETag", "").removeprefix("W/").strip('"') or headers.get("Last-Modified", ""))
