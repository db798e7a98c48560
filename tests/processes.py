"""Processes that tests, demos and benches start: each in a group of its own, which ends with the block that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def running(command: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a command; when the block ends, however it does, all of its group is killed.

    Args:
      command: The command.
      **how: What else `subprocess.Popen` takes.
    """
    process = subprocess.Popen(command, start_new_session=True, **how)
    try:
        yield process
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a group, with all of it, and waits for its end; one that has ended is left alone."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
