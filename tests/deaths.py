"""Kills a process at each of its changes to the disk."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")


def dies_at(number: int, do: Callable[[], Any]) -> bool:
    """Does something in a process of its own, which is killed before its `number`-th change to the disk; whether it was."""
    child = os.fork()
    if child == 0:
        sys.addaudithook(_KillAt(number))
        try:
            do()
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


class _KillAt:
    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _CHANGES or (event == "open" and "w" in str(args[1])):
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)
