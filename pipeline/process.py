"""`PROCESS`: whether the job of this process makes progress, is to stop, or has failed; `stats.counted` has what it counts."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from pipeline.errors import UserError

_CLEAN_UP_SECONDS = 10.0
_TELL_SECONDS = 45.0  # three tries of a webhook


class Part:
    """Counts the work that one part of a job has, and the steps that it has made; thread-safe."""

    def __init__(self) -> None:
        self.waiting = 0  # images, messages or calls that have begun and not ended
        self.steps = 0  # grows with each progress
        self.stalled_s = 0.0  # seconds without progress while work waits, by the last look of the watchdog
        self._lock = threading.Lock()

    def begin(self, number: int = 1) -> None:
        """Adds work."""
        with self._lock:
            self.waiting += number

    def end(self, number: int = 1) -> None:
        """Removes work that is done, or that nobody wants any more."""
        with self._lock:
            self.waiting -= number
            self.steps += 1

    def progressed(self) -> None:
        """Notes progress without an end, such as a call that failed in time and is tried again."""
        with self._lock:
            self.steps += 1

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Surrounds one piece of work."""
        self.begin()
        try:
            yield
        finally:
            self.end()


# each part, in the order of the images' way, with the parts whose progress counts as its own, since it waits for them
PARTS: dict[str, tuple[str, ...]] = {
    "archive": (),  # writes windows
    "pull": (),  # calls Pub/Sub for messages
    "subscriber": ("read", "detector", "publish", "archive"),  # holds messages that no bundle has taken
    "read": (),  # feeds images to the detector, or looks them up
    "detector": (),
    "publish": (),  # publishes a bundle's messages
}


class ProcessState:
    """What the steps of a process share; thread-safe.

    Attributes:
      waiting_for: What the job waits for while no image is done; empty: nothing.
      entered: Staging folders of the runs that this process has joined as a worker; guarded by `entering`.
      entering: Held while a worker checks what it can reach.
      parts: The work of this process, by the name in `PARTS`.
      failing: Services that fail and are tried again, `Pub/Sub`, `storage` or `archive`, by name; the log has the error.
      died: Threads of the run that failed, by name; the log has the error.
      stopped: Whether a signal has stopped the job; its steps, which run in threads, end at their next element.
      before_exit: Tells the outside how the job ended, given its exit code and error, where the process ends at once.
      failure: What the job cannot go on after, as the step that met it raised it; runners pass on only its text.
      on_failure: Ends this process after it, where it is one of a job's workers.
    """

    def __init__(self) -> None:
        self.waiting_for = ""
        self.entered: set[str] = set()
        self.entering = threading.Lock()
        self.parts = {name: Part() for name in PARTS}
        self.failing: set[str] = set()
        self.died: set[str] = set()
        self.stopped = False
        self.before_exit: Callable[[int, str], object] | None = None
        self.failure: UserError | None = None
        self.on_failure: Callable[[UserError], object] | None = None

    def check_stopped(self) -> None:
        """Ends a step of a stopped job at its next element.

        Raises:
          KeyboardInterrupt: The job was stopped.
        """
        if self.stopped:
            raise KeyboardInterrupt

    def clean_up(self, work: Callable[[], object]) -> None:
        """Removes what is removed later otherwise; at the end of a stopped job for some seconds only, since storage may hang."""
        if not self.stopped:
            work()
            return
        cleaning = threading.Thread(target=work, name="clean-up", daemon=True)
        cleaning.start()
        cleaning.join(_CLEAN_UP_SECONDS)

    def fail(self, failure: UserError) -> None:
        """Notes what the job cannot go on after; a worker's process ends here."""
        self.failure = self.failure or failure
        if self.on_failure:
            self.on_failure(failure)

    def exit(self, code: int, error: str) -> NoReturn:
        """Ends this process at once, when its job cannot end; first tells the outside, for as long as that may take."""
        if self.before_exit:
            telling = threading.Thread(target=self.before_exit, args=(code, error), name="tell", daemon=True)
            telling.start()
            telling.join(_TELL_SECONDS)
        os._exit(code)


PROCESS = ProcessState()
