"""The threads of one run. A failed thread ends the job; no thread outlives the run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pipeline.process import PROCESS

_END_SECONDS = 10.0
_log = logging.getLogger(__name__)


class RunThreads:
    """Starts the threads of one run, keeps their first failure, and ends them all.

    Attributes:
      stop: Set when the run takes no more messages; it still finishes those that it holds.
      closed: Set when the run is over; then each thread ends.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.closed = threading.Event()
        self._failure: Exception | None = None
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Starts a thread; an exception of `work` ends the job (`raise_failure`)."""
        thread = threading.Thread(target=self._watch, args=(work,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def raise_failure(self) -> None:
        """Raises the first failure of a thread; a step calls this, where an exception ends the job."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Ends the threads; logs those that do not end."""
        self.stop.set()
        self.closed.set()
        for thread in self._threads:
            thread.join(_END_SECONDS)
        PROCESS.died.clear()
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left:
            _log.warning("still busy after %g s: %s", _END_SECONDS, ", ".join(left))

    def _watch(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as err:  # noqa: BLE001  kept for raise_failure
            self._failure = self._failure or err
            PROCESS.died.add(threading.current_thread().name)
            _log.warning("%s failed: %s: %s", threading.current_thread().name, type(err).__name__, err)
