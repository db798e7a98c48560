"""`FeederProcess` is one of the processes that prepare images, as the job sees it; `pipeline.feed.process` is what runs in it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from pipeline.feed.chunks import Question, Unit
from pipeline.feed.work import Coming
from pipeline.records import EncodedImage

# with this process's own path, not with the current folder; prctl(PR_SET_PDEATHSIG, SIGKILL): it ends with the job's thread
_CODE = """
import sys
sys.path[:] = {path!r}
import ctypes
ctypes.CDLL(None).prctl(1, 9)
from pipeline.feed.process import serve
serve({memory}, {locks})
"""
_ENVIRONMENT = {  # one arena, as more reserve memory; memory for pixels is kept, as the kernel clears each new page
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(16 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 20),
    "OPENBLAS_NUM_THREADS": "1",
}


class FeederProcess:
    """One feeder process.

    Args:
      memory: The descriptor of the shared memory.
      locks: That of the file for the locks of all feeder processes of a job.

    Attributes:
      pid: Its id.
      units: What it works at, in this order.
      asked: The questions that it has not answered, by their numbers.
      is_ready: Whether it has imported what it needs.

    Raises:
      OSError: It cannot be started now.
    """

    def __init__(self, memory: int, locks: int):
        ours, its = socket.socketpair()
        for end in (ours, its):
            end.settimeout(None)  # Beam's sign-in at Google sets a default for all sockets
        self._channel = Connection(ours.detach())
        try:
            with its:
                self._process = subprocess.Popen(  # noqa: S603  a command of ours
                    [sys.executable, "-c", _CODE.format(path=sys.path, memory=memory, locks=locks)],
                    stdin=its.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # decoders print
                    env=os.environ | _ENVIRONMENT,
                    pass_fds=(memory, locks),
                    start_new_session=True,  # Ctrl-C is for the job
                )
        except OSError:  # as for want of memory or of processes at this moment
            self._channel.close()
            raise
        self.pid = self._process.pid
        self.units: deque[Unit] = deque()
        self.asked: dict[int, Question] = {}
        self.is_ready = False

    @property
    def images(self) -> int:
        """How many it has."""
        return sum(len(unit.places) for unit in self.units)

    def start(self, unit: Unit) -> None:
        """Sends the work of a unit, after that of those before it."""
        self.units.append(unit)
        work = unit.next_work()
        if size := sum(len(image.content) for image in work.images.values() if isinstance(image, EncodedImage)):
            self.send(Coming(size))
        self.send(work)

    def ask(self, question: Question) -> None:
        """Sends a question."""
        self.asked[question.asked.number] = question
        self.send(question.asked)

    def send(self, message: Any) -> None:
        """Sends a message; that a process has died, its channel tells the one who receives from it."""
        with contextlib.suppress(OSError):
            self._channel.send(message)

    def messages(self) -> Iterator[Any]:
        """Yields what it sends, until it ends."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                yield self._channel.recv()

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()

    def bury(self) -> int:
        """Frees what is left of a process that has ended, or closed its channel; returns its exit code."""
        self._channel.close()
        self._process.kill()
        return self._process.wait()
