"""The machine's NVIDIA GPUs that this process may use, by names that all processes share, and which of them it takes."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import re
import subprocess
import tempfile
from typing import BinaryIO

from pipeline.limits import Share

_MOST_ON_GPU = 64  # processes
_MIB = 1_048_576
_held: list[BinaryIO] = []  # locks of a GPU, for as long as this process lives
# CUDA counts the fastest GPU first, NVIDIA's driver by the bus; before the first use of CUDA in this process
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def gpu_names(gpus: int) -> list[str]:
    """The names of the GPUs that CUDA shows this process, in its order: their UUIDs, also those of parts (MIG).

    Args:
      gpus: How many it shows. Where NVIDIA's driver does not tell more, their numbers on the machine are their names.
    """
    uuids = _asked("uuid")
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    entries = [entry.strip() for entry in listed.split(",")] if listed else [str(number) for number in range(gpus)]
    names = [uuids[int(entry)] if entry.isdigit() and int(entry) < len(uuids) else entry for entry in entries[:gpus]]
    return [*names, *(f"more-{number}" for number in range(gpus - len(names)))]


def gpu_kind() -> str:
    """Name and driver of the machine's GPUs, for which a program can be compiled; empty where they differ, or nobody tells."""
    told = set(_asked("name,driver_version"))
    return told.pop() if len(told) == 1 else ""


@functools.cache
def take_gpu(gpus: int) -> int:
    """Picks this process's GPU, from 0: the one that the fewest others use; the same one each time.

    The processes of one launcher and the containers of one machine begin at their own number. Each process locks a file with the
    name of its GPU in the machine's temporary folder, since other jobs may be there; the system frees the lock when the process
    ends.

    Args:
      gpus: How many CUDA shows this process.
    """
    if gpus <= 1:
        return 0
    worker = re.search(r"\d+$", os.environ.get("WORKER_ID", ""))  # of Beam; containers have no folder in common
    first = (Share.of_environment().number or int(worker[0] if worker else 0)) % gpus
    names = gpu_names(gpus)
    numbers: list[int] = [*range(first, gpus), *range(first)]
    folder = os.path.join(tempfile.gettempdir(), f"detection-gpus-{os.getuid()}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        for turn, number in itertools.product(range(_MOST_ON_GPU), numbers):
            name = re.sub(r"[^\w-]", "_", names[number])
            lock = open(os.path.join(folder, f"{name}-{turn}"), "ab")  # noqa: SIM115  it stays open
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _held.append(lock)
                return number
            lock.close()
    except OSError:  # the temporary folder does not support locks
        pass
    return first


def free_bytes(gpus: int, *numbers: int) -> int | None:
    """Memory that no process has now of some GPUs by their numbers for CUDA; None where NVIDIA's driver does not tell.

    Args:
      gpus: How many CUDA shows this process.
      *numbers: Of the GPUs; default: all.
    """
    names = gpu_names(gpus)
    wanted = [names[number] for number in numbers or range(gpus) if number < gpus]
    found = [_ask("memory.free", name) for name in wanted if not name.startswith("MIG")]
    told = [int(lines[0]) * _MIB for lines in found if lines and lines[0].isdigit()]
    return sum(told) if told and len(told) == len(wanted) else None


def _ask(what: str, of: str = "") -> list[str]:
    """What NVIDIA's driver tells of all GPUs of the machine, in the order of the bus, or of one; nothing without it."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", *([f"--id={of}"] if of else [])]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in told.splitlines() if line.strip()]


_asked = functools.cache(_ask)  # of what stays
