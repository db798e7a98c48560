"""A streaming job that nobody sends anything, its turns as fast as they go: `python -m tests.benchmarks.idle_turns TURNS FLAG …`.

Prints the resident memory after each eighth of the turns (MB), and the processor time of a turn (ms), as JSON; then the job ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import psutil

from pipeline.run import main
from pipeline.stream import run
from pipeline.stream.messages import Message
from pipeline.stream.subscriber import Subscriber


class CountingIntake(Subscriber):
    """Counts how often a turn takes what waits, and has it wait for nothing."""

    turns = 0
    seconds = 0.0
    resident_mb: list[float] = []  # noqa: RUF012  of the one that there is
    _counting = threading.Lock()

    def pull(self, max_images: int, max_bytes: int, wait_s: float) -> list[Message]:
        """Takes what is there."""
        with self._counting:
            self.count()
        return super().pull(max_images, max_bytes, 0.0)

    def count(self) -> None:
        """Notes memory at each eighth; ends the job at the last turn."""
        cls, last = CountingIntake, int(sys.argv[1])
        cls.turns += 1
        if cls.turns == last // 8:
            cls.seconds = time.process_time()
        if cls.turns % (last // 8) == 0:
            cls.resident_mb.append(round(psutil.Process().memory_info().rss / 1e6, 1))
        if cls.turns == last:
            turn_ms = (time.process_time() - cls.seconds) / (last - last // 8) * 1e3
            print(json.dumps({"resident_mb": cls.resident_mb, "turn_ms": round(turn_ms, 2)}), flush=True)
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    run.Subscriber = CountingIntake  # type: ignore[misc]
    sys.exit(main(sys.argv[2:]))
