"""The progress display of a job: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from pipeline.stats.process import PROCESS
from pipeline.stats.summary import JobStats

_LINE_SECONDS = 10.0


def note(state: str) -> None:
    """Sets what the display shows while no image is done, e.g. `loading the model`; the empty text ends that."""
    PROCESS.waiting_for = state


class ProgressDisplay:
    """Shows the progress of a job until the block ends; use as a context manager.

    Args:
      line: Makes the text of a line, from the seconds since the last one; default: the counts of a batch job, which are a bar
        if standard error is a terminal.
      stats: Returns the statistics to show; default: all that this process counts in the block.
    """

    def __init__(self, line: Callable[[float], str] | None = None, stats: Callable[[], JobStats] | None = None):
        self._own = JobStats()
        if not (line or stats):
            PROCESS.begin_counting(self._own)
        self._stats = stats or functools.partial(PROCESS.copy_of, self._own)
        self._line = line or self._counts_line
        self._show = self._show_bar if line is None and sys.stderr.isatty() else self._print_lines
        self._terminal = _kept_open(sys.stderr)
        self._left = threading.Event()
        self._done = 0
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def __enter__(self) -> ProgressDisplay:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._left.set()
        self._thread.join()
        PROCESS.end_counting(self._own)
        if self._terminal:
            self._terminal.close()

    def _print_lines(self) -> None:
        started = time.monotonic()
        while not self._left.wait(_LINE_SECONDS):
            text = f"{time.monotonic() - started:6.0f} s  {self._line(_LINE_SECONDS)}"
            print(text, file=self._terminal or sys.stderr, flush=True)

    def _counts_line(self, seconds: float) -> str:
        stats = self._stats()
        total, done = stats.read - stats.skipped, stats.detected + stats.failed
        rate, self._done = (done - self._done) / seconds, done
        if PROCESS.waiting_for and not done:
            return f"{PROCESS.waiting_for}; {total} images found" if total else PROCESS.waiting_for
        return f"{done}{f' of {total}' if total else ''} images, {rate:.1f} images/s, {stats.failed} failed"

    def _show_bar(self) -> None:
        from tqdm import tqdm

        with tqdm(file=self._terminal, unit=" images", dynamic_ncols=True, smoothing=0.1) as bar:
            left = False
            while not left:
                left = self._left.wait(0.2)
                stats = self._stats()
                done = stats.detected + stats.failed
                bar.total = stats.read - stats.skipped or None
                # before the bar: a terminal cuts what stands behind it
                bar.set_description("" if done else PROCESS.waiting_for, refresh=False)
                bar.set_postfix_str(f"{stats.failed} failed" if done else "", refresh=False)
                bar.update(done - bar.n)


def _kept_open(stream: Any) -> Any:
    """A second handle of standard error, which works while its descriptor leads elsewhere, as during TensorFlow's import.

    None if it has no descriptor.
    """
    try:
        return os.fdopen(os.dup(stream.fileno()), "w", encoding=stream.encoding, errors="backslashreplace")
    except (AttributeError, OSError):
        return None
