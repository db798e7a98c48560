"""A small HTTP server in a thread of the job, which answers GET with pages."""

from __future__ import annotations

import contextlib
import http.server
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pipeline.errors import ConfigError

_IDLE_SECONDS = 10.0  # of a client that sends or takes nothing
_MOST_CONNECTIONS = 16  # more are closed at once


class Answer(NamedTuple):
    """What a page answers: its headers are further ones, or others than those of plain text."""

    content: bytes
    status: int = 200
    headers: Mapping[str, str] = {}


Page = Callable[[Mapping[str, str]], Answer]  # the argument: the headers of the request


class _Server(http.server.ThreadingHTTPServer):
    _places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
    pages: Mapping[str, Page]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread of its own, if there are few enough."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers one request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a client that went away, or that takes nothing."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _IDLE_SECONDS
    server: _Server

    def do_GET(self) -> None:
        """Answers with the page of this path."""
        pages = self.server.pages
        page = pages.get(self.path.partition("?")[0])
        answer = page(self.headers) if page else Answer(f"{', '.join(pages)}\n".encode(), 404)  # type: ignore[arg-type]
        self.send_response(answer.status)
        headers = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store", **answer.headers}
        for name, value in {**headers, "Content-Length": str(len(answer.content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)

    do_HEAD = do_GET  # noqa: N815  the server's name for it

    def log_message(self, format: str, *args: Any) -> None:
        """Logs no request: a scrape comes every few seconds, for months."""


@contextlib.contextmanager
def served(host: str, port: int, setting: str, pages: Mapping[str, Page]) -> Iterator[int]:
    """Serves pages by path, such as `/metrics`, while the block lasts; yields the port, which is a free one for port 0.

    Raises:
      ConfigError: The address cannot be bound.
    """
    try:
        server = _Server((host, port), _Handler)
    except OSError as err:
        raise ConfigError(f"{setting}: expected a free port of {host}, got {port}: {err.strerror}") from err
    server.pages = pages
    threading.Thread(target=server.serve_forever, name=f"http {setting}", daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
