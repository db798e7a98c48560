"""The progress display of a job: a bar on a terminal for a batch job, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.log_lines import console, kept_open, plural
from pipeline.process import PROCESS
from pipeline.stats.job_stats import JobStats

_LINE_SECONDS = 10.0


@contextlib.contextmanager
def in_background(name: str, work: Callable[[threading.Event], object]) -> Iterator[None]:
    """Runs `work` in a thread while the block lasts; the event is set at the end of the block, which waits for the thread."""
    left = threading.Event()
    thread = threading.Thread(target=work, args=(left,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


@contextlib.contextmanager
def progress_shown(stats: Callable[[], JobStats], *, as_bar: bool = True) -> Iterator[None]:
    """Shows the progress of a job, from its statistics so far, until the block ends; a terminal may get a bar."""
    is_bar = as_bar and sys.stderr.isatty()
    with (kept_open(sys.stderr) if is_bar else None) or contextlib.nullcontext() as terminal:
        show = functools.partial(_show_bar, stats, terminal) if is_bar else functools.partial(_show_lines, stats)
        with in_background("progress", show):
            yield


def line(now: JobStats, before: JobStats, seconds: float) -> str:
    """What a job has done, and how fast since the statistics `before`, so many seconds ago."""
    done, total = now.detected + now.failed, now.read - now.skipped
    if PROCESS.waiting_for and not (done or now.batch_sizes):
        text = f"{PROCESS.waiting_for}; {plural(total, 'image')} found" if total else PROCESS.waiting_for
    else:
        rate = (done - before.detected - before.failed) / max(seconds, 1e-9)
        counts = f"{f'{done} of ' if total else ''}{plural(total or done, 'image')}, {rate:.1f} images/s"
        skipped = [f"{now.skipped} skipped"] if now.skipped else []
        text = ", ".join([counts, *_of_stream(now, before), f"{now.failed} failed", *skipped])
    return f"{text}; {now.canary.line()}" if now.canary else text


def _of_stream(now: JobStats, before: JobStats) -> Iterator[str]:
    """The size of its batches and its latencies since the line before, and the age of its backlog."""
    if now.publish_latencies:
        if batches := now.batches - before.batches:
            yield f"batches of {sum(size * number for size, number in batches.items()) / batches.total():.1f}"
        # an image may get its result before a line and be published after it
        for name, times in (
            ("event-to-publish", now.publish_latencies.since(before.publish_latencies)),
            ("processing", now.latencies.since(before.latencies)),
        ):
            if shown := times.percentiles_ms():
                yield f"{name} p50 {shown['p50']:.0f} ms p99 {shown['p99']:.0f} ms"
    if now.backlog_age_ms:
        yield f"backlog age {now.backlog_age_ms / 1e3:.1f} s"


def _show_lines(stats: Callable[[], JobStats], left: threading.Event) -> None:
    started = last = time.monotonic()
    before = JobStats()
    while not left.wait(_LINE_SECONDS):
        now, looked = stats(), time.monotonic()  # reports of many workers take seconds to read
        console.info("%6.0f s  %s", looked - started, line(now, before, looked - last))
        before, last = now, looked


def _show_bar(stats: Callable[[], JobStats], terminal: Any, left: threading.Event) -> None:
    from tqdm import tqdm

    with tqdm(file=terminal, unit=" images", dynamic_ncols=True, smoothing=0.1) as bar:
        has_ended = False
        while not has_ended:
            has_ended = left.wait(0.2)
            now = stats()
            done = now.detected + now.failed
            bar.total = now.read - now.skipped or None
            # before the bar: a terminal cuts what stands behind it
            bar.set_description("" if done else PROCESS.waiting_for, refresh=False)
            bar.set_postfix_str(f"{now.failed} failed" if done else "", refresh=False)
            bar.update(done - bar.n)
