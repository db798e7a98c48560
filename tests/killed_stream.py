"""Runs a job as `python -m pipeline.run` does; SIGKILL comes at a moment of its first bundle that `KILLED_AFTER` names."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from pipeline.run import main
from pipeline.stream.archive import Archive
from pipeline.stream.clients import Publishing
from pipeline.stream.intake import Intake

MOMENTS = {"archived": (Archive, "spool"), "published": (Publishing, "wait"), "acknowledged": (Intake, "acknowledge")}


def _die_after(cls: type, name: str) -> None:
    """Kills this process as soon as a method that had something to do is done with it."""
    method = getattr(cls, name)

    def last(self: Any, *arguments: Any) -> None:
        had_work = bool(arguments[0] if arguments else self._open)
        method(self, *arguments)
        if had_work:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(cls, name, last)


if __name__ == "__main__":
    _die_after(*MOMENTS[os.environ["KILLED_AFTER"]])
    sys.exit(main(sys.argv[1:]))
