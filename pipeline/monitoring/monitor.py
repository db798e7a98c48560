"""`monitored`, the one place where a job starts what shows it while it runs: display, metrics, health, live page."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from pipeline.config import Config
from pipeline.log_lines import console
from pipeline.monitoring import health
from pipeline.monitoring.http_server import Page, served
from pipeline.monitoring.watchdog import Watchdog
from pipeline.stats.counted import COUNTED
from pipeline.stats.job_stats import JobStats
from pipeline.stats.progress import in_background, progress_shown
from pipeline.stats.samples import REPORT_SAMPLES


@contextlib.contextmanager
def monitored(config: Config, stats: Callable[[], JobStats] | None = None) -> Iterator[None]:
    """Shows a job while the block lasts, and watches whether it progresses; by default what this process counts in the block."""
    monitoring = config.monitoring
    with in_background("watchdog", Watchdog(monitoring.stuck_after_s).run), contextlib.ExitStack() as shown:
        now = stats or functools.partial(COUNTED.stats_of, shown.enter_context(COUNTED.counting()))
        if monitoring.log_level != "error":
            shown.enter_context(progress_shown(now, as_bar=config.mode == "batch" and monitoring.log_format == "text"))
        if monitoring.metrics_port is not None:
            from pipeline.monitoring import prometheus  # its library is needed by nothing else

            pages: dict[str, Page] = {
                "/metrics": prometheus.page(now),
                "/livez": lambda _: health.answer(health.liveness(monitoring.stuck_after_s)),
                "/readyz": lambda _: health.answer(health.readiness(now())),
            }
            host = monitoring.metrics_host
            port = shown.enter_context(served(host, monitoring.metrics_port, "metrics_port", pages))
            console.info("metrics on http://%s:%s/metrics", host, port)
        if monitoring.page_port is not None:
            from pipeline.monitoring.live_page import HOST, LivePage  # only where it is wanted

            COUNTED.samples = max(COUNTED.samples, REPORT_SAMPLES)
            page = LivePage(config, now)
            port = shown.enter_context(served(HOST, monitoring.page_port, "page_port", {"/": page.answer}))
            console.info("live page on http://%s:%s/", HOST, port)
        yield
