"""Runs a streaming job that will be killed: Pub/Sub delivers again soon what it had.

SIGKILL comes at a moment that `KILLED_AFTER` names, the first time; without one, from elsewhere.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence
from typing import Any

from pipeline import run
from pipeline.stream import archive, members, subscriber
from pipeline.stream.clients import Publishing
from pipeline.stream.subscriber import Subscriber

MOMENTS = {
    "durable": (archive, "add_rows"),
    "published": (Publishing, "wait"),
    "acknowledged": (Subscriber, "acknowledge"),
    "the hundredth member": (members, "_of_message"),
}


def _die_after(where: Any, name: str) -> None:
    """Kills this process as soon as a method or function that had something to do is done with it."""
    method, before = getattr(where, name), itertools.count(1)

    def last(self: Any, *arguments: Any) -> Any:
        had_work = bool(arguments[0] if arguments else getattr(self, "_open", True))
        result = method(self, *arguments)
        if had_work and (where is not members or next(before) == 100):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(where, name, last)


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    subscriber.EXTEND_SECONDS = 10  # as short as Pub/Sub's own deadlines can be
    if moment := os.environ["KILLED_AFTER"]:
        _die_after(*MOMENTS[moment])
    return run.main(argv)
