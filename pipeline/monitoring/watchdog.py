"""A watchdog: it ends a job in which work waits and nothing progresses, with the stacks of all threads in a file.

It acknowledges nothing: messages come again, and the next run of a batch job does the rest. Parts report their work
to `PROCESS.parts`. A failed call that is tried again is progress, and so is a model that loads; a call that never returns is not.
A worker that is ended is one that its runner starts again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping

from pipeline.errors import FAILED
from pipeline.log_lines import write_unlocked
from pipeline.process import PARTS, PROCESS, Part

_LOOK_SECONDS = 1.0
_LOOKS = 20  # at least so many before a part is stuck


def end_stuck(name: str, part: Part, *, in_log: bool = False) -> None:
    """Writes the stacks of all threads to a new file, or to standard error, prints one line, and ends the process with code 1."""
    descriptor, place = 2, "this log"
    if not in_log:
        with contextlib.suppress(OSError):  # the disk may be full
            descriptor, place = tempfile.mkstemp(".txt", "stuck-job-")
    faulthandler.dump_traceback(descriptor, all_threads=True)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    waits = f"{part.waiting} waiting, none done for {part.stalled_s:.0f} s (stuck_after_s)"
    # without a lock, since a stuck thread may hold that of the log
    line = f"the job is stuck in its {name}: {waits}; the stacks of all threads are in {place}"
    write_unlocked(line, logging.ERROR)
    PROCESS.exit(FAILED, line)


class Watchdog:
    """Measures for how long each part has work and makes no progress; one that is stuck (0: never) ends the process."""

    def __init__(
        self, stuck_after_s: float, end: Callable[[str, Part], object] = end_stuck, parts: Mapping[str, Part] = PROCESS.parts
    ):
        self._stuck_after_s, self._end, self._parts = stuck_after_s, end, parts
        self._stalled_s = dict.fromkeys(parts, 0.0)
        self._steps = {name: part.steps for name, part in parts.items()}
        self.every_s = min(_LOOK_SECONDS, stuck_after_s / _LOOKS) if stuck_after_s else _LOOK_SECONDS

    def look(self, seconds: float) -> None:
        """Looks at all parts; `seconds` have passed since the last look, in which the process could run."""
        steps = {name: part.steps for name, part in self._parts.items()}
        moved = {name for name in steps if steps[name] != self._steps[name]}
        self._steps = steps
        stuck = ""
        for name, part in self._parts.items():
            waits = part.waiting > 0 and moved.isdisjoint({name, *PARTS[name]})
            part.stalled_s = self._stalled_s[name] = self._stalled_s[name] + seconds if waits else 0.0
            if 0 < self._stuck_after_s <= part.stalled_s:
                stuck = name  # the last one keeps those before it waiting
        if stuck:
            self._end(stuck, self._parts[stuck])

    def run(self, left: threading.Event) -> None:
        """Looks again and again until the event is set."""
        before = time.monotonic()
        while not left.wait(self.every_s):
            now = time.monotonic()
            self.look(min(now - before, 2 * self.every_s))  # a process that was stopped for an hour is not stuck
            before = now


def watch_worker(stuck_after_s: float) -> None:
    """Watches a worker process to its end; the stacks go to its log, since its folders may vanish with it.

    A part that waits for others is not watched: they may be in other workers, and wait for storage there.
    """
    parts = {name: part for name, part in PROCESS.parts.items() if not PARTS[name]}
    watchdog = Watchdog(stuck_after_s, functools.partial(end_stuck, in_log=True), parts)
    threading.Thread(target=watchdog.run, args=(threading.Event(),), name="watchdog", daemon=True).start()
