"""The progress display of a job: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.log_lines import kept_open
from pipeline.stats.background import in_background
from pipeline.stats.job_stats import JobStats
from pipeline.stats.process import PROCESS

_LINE_SECONDS = 10.0


def note(state: str) -> None:
    """Sets what the display shows while no image is done, e.g. `loading the model`; the empty text ends that."""
    PROCESS.waiting_for = state


@contextlib.contextmanager
def progress_shown(stats: Callable[[], JobStats], line: Callable[[float], str] | None = None) -> Iterator[None]:
    """Shows the progress of a job until the block ends.

    Args:
      stats: Returns its statistics so far.
      line: Makes the text of a line, from the seconds since the last one; default: the counts of a batch job, which are a bar
        if standard error is a terminal.
    """
    is_bar = line is None and sys.stderr.isatty()
    with (kept_open(sys.stderr) if is_bar else None) or contextlib.nullcontext() as terminal:
        show = (
            functools.partial(_show_bar, stats, terminal)
            if is_bar
            else functools.partial(_show_lines, line or _counts_line(stats))
        )
        with in_background("progress", show):
            yield


def _show_lines(line: Callable[[float], str], left: threading.Event) -> None:
    started = time.monotonic()
    while not left.wait(_LINE_SECONDS):
        print(f"{time.monotonic() - started:6.0f} s  {line(_LINE_SECONDS)}", file=sys.stderr, flush=True)


def _counts_line(stats: Callable[[], JobStats]) -> Callable[[float], str]:
    before = 0

    def line(seconds: float) -> str:
        nonlocal before
        now = stats()
        total, done = now.read - now.skipped, now.detected + now.failed
        rate, before = (done - before) / seconds, done
        if PROCESS.waiting_for and not done:
            return f"{PROCESS.waiting_for}; {total} images found" if total else PROCESS.waiting_for
        return f"{done}{f' of {total}' if total else ''} images, {rate:.1f} images/s, {now.failed} failed"

    return line


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
