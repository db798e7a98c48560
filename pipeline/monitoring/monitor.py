"""`monitored`, the one place where a job starts what shows it while it runs: display, metrics, health, live page."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator

from pipeline.config import Config, MonitoringConfig
from pipeline.monitoring import health
from pipeline.monitoring.http_server import served
from pipeline.monitoring.watchdog import watched
from pipeline.stats.process import PROCESS
from pipeline.stats.progress import ProgressDisplay
from pipeline.stats.samples import REPORT_SAMPLES
from pipeline.stats.summary import JobStats


@contextlib.contextmanager
def monitored(
    config: Config, stats: Callable[[], JobStats] | None = None, line: Callable[[float], str] | None = None
) -> Iterator[None]:
    """Shows a job while the block lasts, and watches whether it progresses.

    Args:
      config: Its settings.
      stats: Returns a copy of the statistics so far; default: all that this process counts in the block.
      line: Makes the text of a progress line, from the seconds since the last one; default: the counts of a batch job.
    """
    monitoring = config.monitoring
    display = ProgressDisplay(line, stats, every_s=monitoring.report_every_s, quiet=monitoring.log_level == "error")
    with display, contextlib.ExitStack() as shown:
        shown.enter_context(watched(monitoring.stuck_after_s))
        now = stats or (lambda: PROCESS.add_model(display.stats()))
        _show_metrics(monitoring, now, shown)
        _show_page(config, now, shown)
        yield


def _show_metrics(monitoring: MonitoringConfig, stats: Callable[[], JobStats], shown: contextlib.ExitStack) -> None:
    """Serves the metrics, if the settings ask for it, until the stack is closed."""
    if monitoring.metrics_port is None:
        return
    from pipeline.monitoring import metrics  # its library is needed by nothing else

    live = health.application(functools.partial(health.liveness, monitoring.stuck_after_s))
    ready = health.application(lambda: health.readiness(stats()))
    applications = {"/metrics": metrics.application(stats), "/livez": live, "/readyz": ready}
    host = monitoring.metrics_host
    port = shown.enter_context(served(host, monitoring.metrics_port, "metrics_port", applications))
    print(f"metrics on http://{host}:{port}/metrics", file=sys.stderr, flush=True)


def _show_page(config: Config, stats: Callable[[], JobStats], shown: contextlib.ExitStack) -> None:
    """Serves the live page, if the settings ask for it, until the stack is closed."""
    port = config.monitoring.page_port
    if port is None:
        return
    from pipeline.monitoring.live_page import HOST, application  # only where it is wanted

    PROCESS.samples = REPORT_SAMPLES
    port = shown.enter_context(served(HOST, port, "page_port", {"/": application(config, stats)}))
    print(f"live page on http://{HOST}:{port}/", file=sys.stderr, flush=True)
