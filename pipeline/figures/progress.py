"""What a person sees while a local job runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from types import TracebackType

_counts: Counter[str] = Counter()
_lock = threading.Lock()
_LINE_SECONDS = 10.0


def count(what: str, n: int = 1) -> None:
    """Notes that `n` more images of this process are `listed`, `detected` or `dead`.

    For display only: results are counted from the records.
    """
    with _lock:
        _counts[what] += n


def snapshot() -> Counter[str]:
    """The counts so far."""
    with _lock:
        return _counts.copy()


class ProgressDisplay:
    """Shows the counts of this process until left; use as a context manager around a run."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._before = snapshot()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def __enter__(self) -> ProgressDisplay:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _show(self) -> None:
        if sys.stderr.isatty():
            self._show_bar()
        else:
            self._print_lines()

    def _show_bar(self) -> None:
        from tqdm import tqdm

        with tqdm(unit=" images", dynamic_ncols=True, smoothing=0.1) as bar:
            stopped = False
            while not stopped:
                stopped = self._stop.wait(0.2)
                counts = snapshot() - self._before
                bar.total = counts["listed"] or None
                bar.set_postfix_str(f"{counts['dead']} failed", refresh=False)
                bar.update(counts["detected"] + counts["dead"] - bar.n)

    def _print_lines(self) -> None:
        started, shown = time.monotonic(), 0
        while not self._stop.wait(_LINE_SECONDS):
            counts = snapshot() - self._before
            done = counts["detected"] + counts["dead"]
            rate = (done - shown) / _LINE_SECONDS
            shown = done
            listed = f" of {counts['listed']}" if counts["listed"] else ""
            seconds = time.monotonic() - started
            print(
                f"{seconds:6.0f} s  {done}{listed} images, {rate:.1f} images/s, {counts['dead']} failed",
                file=sys.stderr,
                flush=True,
            )
