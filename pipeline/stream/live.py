"""The statistics of a stream while it runs, and the text of its progress lines."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.stats.histogram import Times
from pipeline.stats.job_stats import JobStats, merge_stats
from pipeline.stats.process import PROCESS
from pipeline.stats.worker_reports import WorkerReports


def stream_stats(counted: JobStats, reports: WorkerReports | None, samples: int) -> JobStats:
    """What this process has counted, or what the workers have reported.

    Of theirs, only images with an outcome count as read: messages of the others come again, in the next run.
    """
    if not reports:
        return PROCESS.add_model(PROCESS.copy_of(counted))
    stats = merge_stats(reports.now(), samples)
    stats.read = stats.detected + stats.failed + stats.skipped
    return stats


def stream_line(stats: Callable[[], JobStats]) -> Callable[[float], str]:
    """Makes progress lines, each about the time since the one before, from the seconds since then.

    An image has two latencies: `event-to-publish`, from its event time (for most messages: their publishing) to the publishing
    of its result, and `in-hand-to-result`, from its bytes in memory to the model's result.
    """
    before = JobStats()

    def line(seconds: float) -> str:
        nonlocal before
        now, earlier = stats(), before
        before = now
        if not (now.read or now.batch_sizes):
            return PROCESS.waiting_for or "waiting for workers"
        detected, batches = now.detected - earlier.detected, now.batches - earlier.batches
        text = f"{now.detected} images, {detected / max(seconds, 1e-9):.1f} images/s"
        if detected:
            images = sum(size * number for size, number in batches.items())
            text += f", batches of {images / max(batches.total(), 1):.1f}"
            text += _shown("event-to-publish", now.publish_latencies.since(earlier.publish_latencies))
            text += _shown("in-hand-to-result", now.latencies.since(earlier.latencies))
        text += f", backlog age {now.backlog_age_ms / 1e3:.1f} s, {now.failed} dead, {now.skipped} skipped"
        return f"{text}; {now.canary.line()}" if now.canary else text

    return line


def _shown(name: str, latencies: Times) -> str:
    shown = latencies.percentiles_ms()
    return f", {name} p50 {shown['p50']:.0f} ms p99 {shown['p99']:.0f} ms" if shown else ""
