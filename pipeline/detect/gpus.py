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
from collections.abc import Sequence
from typing import BinaryIO

from pipeline.config.engines import AUTO
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
    names = [_uuid(entry, uuids) for entry in entries[:gpus]]
    return [*names, *(f"more-{number}" for number in range(gpus - len(names)))]


def _uuid(entry: str, uuids: Sequence[str]) -> str:
    """The UUID for an entry of `CUDA_VISIBLE_DEVICES`: a number, a UUID or its beginning; itself if none is known."""
    if entry.isdigit():
        return uuids[int(entry)] if int(entry) < len(uuids) else entry
    return next((uuid for uuid in uuids if uuid.startswith(entry)), entry)


def gpu_kind() -> str:
    """Name and driver of the machine's GPUs, for which a program can be compiled; empty where they differ, or nobody tells."""
    told = set(_asked("name,driver_version"))
    return told.pop() if len(told) == 1 else ""


def take_gpu(gpus: int, device: str = AUTO) -> int:
    """Picks this process's GPU, from 0: the one that is asked for, else one that the fewest others use; the same one each time.

    The processes of one launcher and the containers of one machine begin at their own number. Each process locks a file with the
    name of its GPU in the machine's temporary folder, since other jobs may be there; the system frees the lock when the process
    ends.

    Args:
      gpus: How many CUDA shows this process.
      device: Of the settings; `gpu:<number>` asks for one, which may not be there.
    """
    asked = device.partition(":")[2]
    return _taken(gpus, int(asked) if asked else None)


@functools.cache
def _taken(gpus: int, asked: int | None) -> int:
    worker = re.search(r"\d+$", os.environ.get("WORKER_ID", ""))  # of Beam; containers have no folder in common
    first = (Share.of_environment().number or int(worker[0] if worker else 0)) % max(gpus, 1) if asked is None else asked
    if first >= gpus:
        return first
    numbers: list[int] = [*range(first, gpus), *range(first)] if asked is None else [asked]
    names = gpu_names(gpus)
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


def free_bytes(number: int, gpus: int) -> int | None:
    """Memory of a GPU, by its number for CUDA, that no process has; None where the driver does not tell, as of a part (MIG)."""
    names = [name for name in gpu_names(gpus)[number : number + 1] if not name.startswith("MIG")]
    told = [line for name in names for line in _ask("memory.free", name)]
    return int(told[0]) * _MIB if told and told[0].isdigit() else None


def _ask(what: str, of: str = "") -> list[str]:
    """What NVIDIA's driver tells of all GPUs of the machine, in the order of the bus, or of one; nothing without it."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", *([f"--id={of}"] if of else [])]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in told.splitlines() if line.strip()]


_asked = functools.cache(_ask)  # of what stays
