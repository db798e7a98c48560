"""The live page of a job: the report so far, which reloads itself.

The page is for a person at this machine. It shows names and pictures of images, so it is bound to the loopback address, refuses
requests under another name (DNS rebinding), and changes nothing. While nobody looks at it, it costs nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.monitoring.http_server import plain
from pipeline.report.formats import duration, number
from pipeline.report.page import environment, page_style, report_values
from pipeline.stats.samples import REPORT_SAMPLES, chosen
from pipeline.stats.summary import JobStats, RunFacts, summarise

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")
_EVERY_S = 5  # the page reloads itself as often
_HEADERS = [
    *(("Content-Type", "text/html; charset=utf-8"), ("Cache-Control", "no-store")),
    *(("Content-Security-Policy", "frame-ancestors 'none'"), ("Cross-Origin-Resource-Policy", "same-origin")),
    *(("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer")),
]


def application(config: Config, stats: Callable[[], JobStats]) -> WSGIApplication:
    """The WSGI application that answers with the page.

    Args:
      config: The job's settings.
      stats: Returns a consistent copy of its statistics; has no side effects.
    """
    started, rendering = time.time(), threading.Lock()
    before: tuple[float, JobStats] | None = None
    page, made_at = b"", 0.0

    def answer(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        nonlocal before, page, made_at
        if environ.get("HTTP_HOST", "").partition(":")[0] not in _NAMES:  # browsers leave out port 80
            return plain(start_response, "421 Misdirected Request", f"expected the host {' or '.join(_NAMES)}")
        with rendering:  # once for all readers
            now = time.time()
            if not page or now - made_at > _EVERY_S / 2:
                seen = stats()
                page, before, made_at = _html(config, seen, before, started, now).encode(), (now, seen), now
        start_response("200 OK", [*_HEADERS])  # the server adds to the list
        return [page]

    return answer


def _html(config: Config, stats: JobStats, before: tuple[float, JobStats] | None, started: float, now: float) -> str:
    ready = max(started, min(stats.began, now))
    facts = RunFacts(
        *(started, ready, now, "", config.as_dict(), config.mode, config.model.path),
        allowed_batch_sizes=stats.batch_sizes,
        canary=stats.canary,
        model_notes=stats.model_notes,
    )
    letters = [letter for letters in stats.dead_examples.values() for letter in letters]
    values = report_values(summarise(stats, facts), chosen(stats.pictures, REPORT_SAMPLES), letters, is_running=True)
    recent = _since(stats, *(before or (ready, JobStats())), now)
    shown = {**values, "facts": [*recent, ("Running for", duration(now - started))], "every_s": _EVERY_S}
    return environment().get_template("live.html").render(**page_style(), **shown)


def _since(stats: JobStats, since: float, before: JobStats, now: float) -> list[tuple[str, str]]:
    """What happened since the last load of the page."""
    batches = stats.batches - before.batches
    room = batches.total() * max(stats.batch_sizes, default=0)
    filled = sum(size * count for size, count in batches.items())
    rate = (stats.detected - before.detected) / max(now - since, 1e-3)
    published = stats.publish_latencies.since(before.publish_latencies)
    latencies = (published or stats.latencies.since(before.latencies)).percentiles_ms()
    return [
        ("Images per second", number(rate, 1)),
        ("Batches filled", f"{100 * filled / room:.0f} %" if room else number(None)),
        *(
            (f"Latency, {name}", duration(latencies[key] / 1e3))
            for key, name in (("p50", "median"), ("p99", "99 %"))
            if latencies
        ),
        *([("Backlog age", duration(stats.backlog_age_ms / 1e3))] if stats.backlog_age_ms else []),
        ("Versions put into use", number(stats.model_events["swaps"])),
    ]
