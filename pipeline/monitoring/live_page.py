"""The live page of a job: the report so far, rendered on the server and kept up to date by server-sent events.

The page is for a person at this machine. It shows names and pictures of images, so it is bound to the loopback address, refuses
requests under another name (DNS rebinding), and changes nothing. While nobody looks at it, it costs nothing.
"""

from __future__ import annotations

import collections
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.monitoring.http_server import plain
from pipeline.records import DetectedImage, identity_hash
from pipeline.report.annotate import annotate
from pipeline.report.formats import duration, number
from pipeline.report.page import environment, page_style, report_values
from pipeline.stats.histogram import percentiles_ms
from pipeline.stats.process import PROCESS
from pipeline.stats.samples import REPORT_SAMPLES, chosen
from pipeline.stats.summary import JobStats, RunFacts, summarise

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")
_EVERY_S = 2.0
_WINDOW_S = 10.0  # of the figures that are said of now
_READERS = 8  # connections for events
_HEADERS = [
    ("Content-Security-Policy", "frame-ancestors 'none'"),
    *(("Cross-Origin-Resource-Policy", "same-origin"), ("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer")),
]


class LivePage:
    """Serves the page, its events and its pictures.

    Args:
      config: The job's settings.
      stats: Returns a consistent copy of its statistics; has no side effects.
    """

    def __init__(self, config: Config, stats: Callable[[], JobStats]):
        self._config, self._stats = config, stats
        self._started = time.time()
        self._rendering = threading.Lock()
        self._rendered, self._rendered_at = "", -_EVERY_S
        self._before: collections.deque[tuple[float, JobStats]] = collections.deque(maxlen=round(_WINDOW_S / _EVERY_S))
        self._pictures: Mapping[str, DetectedImage] = {}
        self._over = threading.Event()
        self._readers = threading.Semaphore(_READERS)

    def applications(self) -> dict[str, WSGIApplication]:
        """The WSGI applications by path."""
        found = {"/": self._page, "/events": self._events, "/picture": self._picture}
        return {path: _for_this_machine(application) for path, application in found.items()}

    def close(self) -> None:
        """Ends the events."""
        self._over.set()

    def _page(self, _environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        return _answer(start_response, "text/html; charset=utf-8", self._html().encode())

    def _events(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("HTTP_SEC_FETCH_SITE") == "cross-site":  # it could not read them, but hold all connections
            return plain(start_response, "403 Forbidden", "expected the page of this server")
        start_response("200 OK", [("Content-Type", "text/event-stream"), ("Cache-Control", "no-store"), *_HEADERS])
        return self._updates()

    def _updates(self) -> Iterator[bytes]:
        if not self._readers.acquire(blocking=False):
            return  # the browser tries again
        try:
            while not self._over.is_set():
                yield f"data: {json.dumps(self._main())}\n\n".encode()
                self._over.wait(_EVERY_S)
        finally:
            self._readers.release()

    def _picture(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        image = self._pictures.get(environ["QUERY_STRING"])
        try:
            return _answer(start_response, "image/jpeg", annotate(image) if image else b"")
        except ValueError:  # the thumbnail is no picture
            return _answer(start_response, "image/jpeg", b"")

    def _main(self) -> str:
        """The content of the page's `main`."""
        return self._html().partition("<main>")[2].partition("</main>")[0]

    def _html(self) -> str:
        """The page, rendered once for all readers: each rendering moves the window of the figures that are said of now."""
        with self._rendering:
            if time.monotonic() - self._rendered_at > _EVERY_S / 2:
                style = page_style("live.css", script="live.js")
                self._rendered = environment().get_template("live.html").render(**style, **self._values())
                self._rendered_at = time.monotonic()
            return self._rendered

    def _values(self) -> dict[str, Any]:
        stats, now = self._stats(), time.time()
        ready = max(self._started, min(stats.began, now))
        facts = RunFacts(
            *(self._started, ready, now, "", self._config.as_dict(), self._config.mode, self._config.model.path),
            allowed_batch_sizes=stats.batch_sizes,
            canary=stats.canary,
            model_notes=stats.model_notes,
        )
        kept = [(identity_hash(image.ref.identity), image) for _, image in chosen(stats.pictures, REPORT_SAMPLES)]
        newest = [("", image, key) for key, image in PROCESS.newest.look() or kept]
        compared = stats.canary.pictures() if stats.canary else []
        pairs = [(title, image, identity_hash(f"{title} {image.ref.identity}")) for title, image in compared]
        self._pictures = {str(key): image for _, image, key in (*newest, *pairs)}
        letters = [letter for letters in stats.dead_examples.values() for letter in letters]
        pictures, disagreements = (
            [(title, image, f"picture?{key}" if image.thumbnail else "") for title, image, key in images]
            for images in (newest, pairs)
        )
        values = report_values(summarise(stats, facts), pictures, letters, disagreements)
        left = max(0, stats.read - stats.detected - stats.failed - stats.skipped)
        values["account"].append(("left", "+", left, "in hand"))
        values["parts"].append(("left", left))
        return {
            **values,
            "adds_up": True,
            "filter_confidences": (),
            "samples_title": "Newest images",
            "facts": self._facts(stats, now),
        }

    def _facts(self, stats: JobStats, now: float) -> list[tuple[str, str]]:
        """What happened in the last seconds."""
        recent = [(at, before) for at, before in self._before if now - at <= 2 * _WINDOW_S]
        since, before = recent[0] if recent else (max(self._started, min(stats.began, now)), JobStats())
        self._before.append((now, stats))
        batches = stats.batches - before.batches
        room = sum(batches.values()) * max(stats.batch_sizes, default=0)
        filled = sum(size * count for size, count in batches.items())
        rate = (stats.detected - before.detected) / max(now - since, 1e-3)
        streams = [("Backlog age", duration(stats.backlog_age_ms / 1e3))] if self._config.mode == "streaming" else []
        return [
            ("Images per second", number(rate, 1)),
            *streams,
            ("Batches filled", f"{100 * filled / room:.0f} %" if room else number(None)),
            *_percentiles("In hand to result", stats.latencies - before.latencies),
            *(_percentiles("Event to publish", stats.publish_latencies - before.publish_latencies) if streams else []),
            ("Versions put into use", number(stats.model_events["swaps"])),
            ("Running for", duration(now - self._started)),
        ]


def _percentiles(name: str, latencies: Mapping[int, int]) -> list[tuple[str, str]]:
    found = percentiles_ms(latencies) if latencies else {}
    return [
        (f"{name}, {what}", duration(found[key] / 1e3 if found else None)) for key, what in (("p50", "median"), ("p99", "99 %"))
    ]


def _answer(start_response: StartResponse, kind: str, content: bytes) -> list[bytes]:
    status = "200 OK" if content else "404 Not Found"
    start_response(
        status,
        [("Content-Type", kind), ("Cache-Control", "private, max-age=60" if kind == "image/jpeg" else "no-store"), *_HEADERS],
    )
    return [content]


def _for_this_machine(application: WSGIApplication) -> WSGIApplication:
    def answer(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("HTTP_HOST", "").partition(":")[0] not in _NAMES:  # browsers leave out port 80
            return plain(start_response, "421 Misdirected Request", f"expected the host {' or '.join(_NAMES)}")
        return application(environ, start_response)

    return answer
