"""Runs a job as `python -m pipeline.run` does, to be killed: what it has in hand then comes again soon.

SIGKILL comes at a moment that `KILLED_AFTER` names, the first time; without one, from elsewhere.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from pipeline.detect.canary import Canary
from pipeline.run import main
from pipeline.stream import subscriber
from pipeline.stream.archive import Archive
from pipeline.stream.clients import Publishing
from pipeline.stream.subscriber import Subscriber

MOMENTS = {
    "archived": (Archive, "spill"),
    "published": (Publishing, "wait"),
    "acknowledged": (Subscriber, "acknowledge"),
    "judged": (Canary, "verdict"),
}


def _die_after(cls: type, name: str) -> None:
    """Kills this process as soon as a method that had something to do is done with it."""
    method = getattr(cls, name)

    def last(self: Any, *arguments: Any) -> Any:
        had_work = bool(arguments[0] if arguments else getattr(self, "_open", True))
        result = method(self, *arguments)
        if had_work and result != "":  # which is no verdict yet
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(cls, name, last)


if __name__ == "__main__":
    subscriber.EXTEND_SECONDS = 10  # as short as Pub/Sub's own deadlines can be
    if os.environ["KILLED_AFTER"]:
        _die_after(*MOMENTS[os.environ["KILLED_AFTER"]])
    sys.exit(main(sys.argv[1:]))
