"""What a person sees while a job runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from pipeline.stats.metrics import process_counts

_LINE_SECONDS = 10.0
_state = ""


def note(state: str) -> None:
    """Says what the job waits for while no image is done, e.g. `loading the model`; the empty text ends that."""
    global _state  # noqa: PLW0603  one job runs in a process at a time, and one display shows it
    _state = state


class ProgressDisplay:
    """Shows what happens until left; use as a context manager around a run.

    Args:
      line: Gives the text of a line, from the seconds since the last one; by default the counts of a batch job, which are a bar
        where standard error is a terminal.
      counts: Gives these counts; default: those of this process.
    """

    def __init__(self, line: Callable[[float], str] | None = None, counts: Callable[[], Counter[str]] = process_counts):
        self._line = line or self._counts_line
        self._counts_now = counts
        self._show = self._show_bar if line is None and sys.stderr.isatty() else self._print_lines
        self._terminal = _kept_open(sys.stderr)
        self._left = threading.Event()
        self._before = counts()
        self._done = 0
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def __enter__(self) -> ProgressDisplay:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._left.set()
        self._thread.join()
        if self._terminal:
            self._terminal.close()

    def _print_lines(self) -> None:
        started = time.monotonic()
        while not self._left.wait(_LINE_SECONDS):
            print(
                f"{time.monotonic() - started:6.0f} s  {self._line(_LINE_SECONDS)}", file=self._terminal or sys.stderr, flush=True
            )

    def _counts_line(self, seconds: float) -> str:
        counts = self._counts()
        total, done = _total(counts), _done(counts)
        rate, self._done = (done - self._done) / seconds, done
        if _state and not done:
            return f"{_state}; {total} images found" if total else _state
        return f"{done}{f' of {total}' if total else ''} images, {rate:.1f} images/s, {counts['dead']} failed"

    def _show_bar(self) -> None:
        from tqdm import tqdm

        with tqdm(file=self._terminal, unit=" images", dynamic_ncols=True, smoothing=0.1) as bar:
            left = False
            while not left:
                left = self._left.wait(0.2)
                counts = self._counts()
                bar.total = _total(counts) or None
                # before the bar: what comes behind it is cut where the terminal ends
                bar.set_description(_state if not _done(counts) else "", refresh=False)
                bar.set_postfix_str(f"{counts['dead']} failed" if _done(counts) else "", refresh=False)
                bar.update(_done(counts) - bar.n)

    def _counts(self) -> Counter[str]:
        return self._counts_now() - self._before


def _kept_open(stream: Any) -> Any:
    """The same standard error, also while its file descriptor leads elsewhere, as it does where TensorFlow is imported.

    None where it has no descriptor.
    """
    try:
        return os.fdopen(os.dup(stream.fileno()), "w", encoding=stream.encoding, errors="backslashreplace")
    except (AttributeError, OSError):
        return None


def _total(counts: Counter[str]) -> int:
    return counts["read"] - counts["skipped"]


def _done(counts: Counter[str]) -> int:
    return counts["detected"] + counts["dead"]
