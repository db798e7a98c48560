"""A small HTTP server in a thread of the job; what it serves are WSGI applications."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication

_IDLE_SECONDS = 10.0  # of a connection without a request
_MOST_CONNECTIONS = 16  # more are closed at once


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True
    _places = threading.BoundedSemaphore(_MOST_CONNECTIONS)

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
        """Ignores a client that went away; WSGI applications' errors are answers with status 500."""


class _Handler(WSGIRequestHandler):
    timeout = _IDLE_SECONDS

    def setup(self) -> None:
        """Treats a client that takes nothing for so long as one that went away: wsgiref prints a trace for other errors."""
        super().setup()
        write = self.wfile.write

        def write_in_time(content: bytes) -> int:
            try:
                return write(content)
            except TimeoutError as err:
                raise BrokenPipeError from err

        self.wfile.write = write_in_time  # type: ignore[assignment, method-assign]

    def log_message(self, format: str, *args: Any) -> None:
        """Logs no request: a scrape comes every few seconds, for months."""


@contextlib.contextmanager
def served(host: str, port: int, setting: str, applications: Mapping[str, WSGIApplication]) -> Iterator[int]:
    """Serves applications by their path while the block lasts; yields the port.

    Args:
      host: Address to bind.
      port: Port to bind; 0: a free one.
      setting: The setting that has the port, for the error.
      applications: WSGI applications by path, such as `/metrics`. They answer GET and HEAD only.

    Raises:
      ConfigError: The address cannot be bound.
    """
    try:
        server = _Server((host, port), _Handler)
    except OSError as err:
        raise ConfigError(f"{setting}: expected a free port of {host}, got {port}: {err.strerror}") from err
    server.set_app(_by_path(applications))
    thread = threading.Thread(target=server.serve_forever, name=f"http {setting}", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def _by_path(applications: Mapping[str, WSGIApplication]) -> WSGIApplication:
    def application(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        found = applications.get(environ["PATH_INFO"])
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return plain(start_response, "405 Method Not Allowed", "only GET")
        return found(environ, start_response) if found else plain(start_response, "404 Not Found", ", ".join(applications))

    return application


def plain(start_response: StartResponse, status: str, text: str) -> list[bytes]:
    """Answers with a line of text."""
    start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")])
    return [f"{text}\n".encode()]
