"""Which of the machine's NVIDIA GPUs this process takes."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import tempfile
from typing import BinaryIO

_MOST_ON_GPU = 64  # processes
_held: list[BinaryIO] = []  # locks of a GPU, for as long as this process lives


@functools.cache
def take_gpu(gpus: int) -> int:
    """Picks this process's GPU, from 0: the one that the fewest others use; the same one each time.

    Runners do not assign GPUs to their processes. So each process locks a file in the machine's temporary folder; the system
    frees the lock when the process ends.

    Args:
      gpus: How many the machine has.
    """
    if gpus <= 1:
        return 0
    folder = os.path.join(tempfile.gettempdir(), f"detection-gpus-{os.getuid()}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        for turn, number in itertools.product(range(_MOST_ON_GPU), range(gpus)):
            lock = open(os.path.join(folder, f"{number}-{turn}"), "ab")  # noqa: SIM115  it stays open
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _held.append(lock)
                return number
            lock.close()
    except OSError:  # the temporary folder does not support locks
        pass
    return 0
