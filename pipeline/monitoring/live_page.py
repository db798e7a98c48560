"""The live page of a job: the report so far, which reloads itself.

The page is for a person at this machine. It shows names and pictures of images, so it is bound to the loopback address, refuses
requests under another name (DNS rebinding), and changes nothing. While nobody looks at it, it costs nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from pipeline.config import Config
from pipeline.monitoring.http_server import Answer
from pipeline.report.page import render_report
from pipeline.report.texts import duration, number
from pipeline.stats.job_stats import JobStats
from pipeline.stats.samples import REPORT_SAMPLES, chosen
from pipeline.stats.summary import RunFacts, summarise

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")
_EVERY_S = 5  # the page reloads itself as often
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class LivePage:
    """Renders the page from consistent copies of the job's statistics; thread-safe."""

    def __init__(self, config: Config, stats: Callable[[], JobStats]):
        self._config = config
        self._stats = stats
        self._started, self._seen_at = time.time(), 0.0
        self._seen = JobStats()
        self._page = b""
        self._rendering = threading.Lock()

    def answer(self, headers: Mapping[str, str]) -> Answer:
        """The page, rendered once for all readers of a moment."""
        if headers.get("Host", "").partition(":")[0] not in _NAMES:  # browsers leave out port 80
            return Answer(f"expected the host {' or '.join(_NAMES)}\n".encode(), 421)
        with self._rendering:
            now = time.time()
            if now - self._seen_at > _EVERY_S / 2:
                seen = self._stats()
                self._page = self._html(seen, now).encode()
                self._seen, self._seen_at = seen, now
        return Answer(self._page, headers=_HEADERS)

    def _html(self, stats: JobStats, now: float) -> str:
        ready = max(self._started, min(stats.began, now))
        facts = RunFacts(self._started, ready, now, "", self._config.as_dict())
        recent = [*self._since(stats, now - (self._seen_at or ready)), ("Running for", duration(now - self._started))]
        live = {"facts": recent, "every_s": _EVERY_S}
        return render_report(summarise(stats, facts), chosen(stats.pictures, REPORT_SAMPLES), stats.dead_examples, live=live)

    def _since(self, stats: JobStats, seconds: float) -> list[tuple[str, str]]:
        """What happened since the last load of the page, so many seconds ago."""
        before = self._seen
        batches = stats.batches - before.batches
        room = batches.total() * max(stats.batch_sizes, default=0)
        filled = sum(size * count for size, count in batches.items())
        published = stats.publish_latencies.since(before.publish_latencies)
        latencies = (published or stats.latencies.since(before.latencies)).percentiles_ms()
        return [
            ("Images per second", number((stats.detected - before.detected) / max(seconds, 1e-3), 1)),
            ("Batches filled", f"{100 * filled / room:.0f} %" if room else number(None)),
            *(
                (f"Latency, {name}", duration(latencies[key] / 1e3))
                for key, name in (("p50", "median"), ("p99", "99 %"))
                if latencies
            ),
            *([("Backlog age", duration(stats.backlog_age_ms / 1e3))] if stats.backlog_age_ms else []),
            ("Versions put into use", number(stats.model_events["swaps"])),
        ]
