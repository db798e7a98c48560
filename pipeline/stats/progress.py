"""The progress display of a job: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable

from pipeline.log_lines import LogLines, kept_open
from pipeline.stats.process import PROCESS
from pipeline.stats.summary import JobStats

_LINE_SECONDS = 10.0  # by default


def note(state: str) -> None:
    """Sets what the display shows while no image is done, e.g. `loading the model`; the empty text ends that."""
    PROCESS.waiting_for = state


class ProgressDisplay:
    """Shows the progress of a job until the block ends; use as a context manager.

    Args:
      line: Makes the text of a line, from the seconds since the last one; default: the counts of a batch job, which are a bar
        if standard error is a terminal.
      stats: Returns the statistics to show; default: all that this process counts in the block.
      every_s: Seconds between two lines.
      quiet: Whether to show nothing.

    Attributes:
      stats: The same.
    """

    def __init__(
        self,
        line: Callable[[float], str] | None = None,
        stats: Callable[[], JobStats] | None = None,
        *,
        every_s: float | None = None,
        quiet: bool = False,
    ):
        self._own = JobStats()
        if not (line or stats):
            PROCESS.begin_counting(self._own)
        self.stats = stats or functools.partial(PROCESS.copy_of, self._own)
        self._line = line or self._counts_line
        self._formats = isinstance(sys.stderr, LogLines)  # it keeps its descriptor itself
        self._show = self._show_bar if line is None and sys.stderr.isatty() else self._print_lines
        if quiet:
            self._show = lambda: None
        self._terminal = kept_open(sys.stderr)
        self._every_s = every_s or _LINE_SECONDS
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
        while not self._left.wait(self._every_s):
            text = f"{time.monotonic() - started:6.0f} s  {self._line(self._every_s)}"
            print(text, file=sys.stderr if self._formats else self._terminal or sys.stderr, flush=True)

    def _counts_line(self, seconds: float) -> str:
        stats = self.stats()
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
                stats = self.stats()
                done = stats.detected + stats.failed
                bar.total = stats.read - stats.skipped or None
                # before the bar: a terminal cuts what stands behind it
                bar.set_description("" if done else PROCESS.waiting_for, refresh=False)
                bar.set_postfix_str(f"{stats.failed} failed" if done else "", refresh=False)
                bar.update(done - bar.n)
