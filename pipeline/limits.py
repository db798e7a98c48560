"""Limits of the container: CPU quota and memory of the control groups (cgroups v2) of this process.

https://docs.kernel.org/admin-guide/cgroup-v2.html: `cpu.max` holds quota and period, `memory.max` bytes; a group never gets
more than the groups above it.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LEAST_BYTES = 1_000_000.0  # an image always gets through, one at a time
_SHARE = 0.25  # of free memory for one buffer of encoded images: there are three, and decoded images need the rest


def available_cpus(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """CPUs that this process may use: those of its affinity, or its quota, rounded up, if that is less.

    Args:
      groups: Where control groups are mounted.
      own: The file that names the group of this process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [line.split() for line in _values("cpu.max", groups, own)]
    quotas = [math.ceil(int(quota) / int(period)) for quota, period in limits if quota != "max"]
    return max(1, min([cores, *quotas]))


def machine() -> str:
    """What decides the speed here: processor, CPUs that may be used, and NVIDIA's devices."""
    model = None
    with contextlib.suppress(OSError):
        model = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    gpus = nvidia_gpus()
    processor = " ".join(model[1].split()) if model else platform.machine()
    return f"{processor}, {available_cpus()} CPUs" + (f", {gpus} GPUs" if gpus else "")


def nvidia_gpus(devices: str = "/dev/nvidia[0-9]*") -> int:
    """NVIDIA's GPUs that this process may use: of the devices, those that `CUDA_VISIBLE_DEVICES` lists before a wrong entry."""
    there, listed = len(glob.glob(devices)), os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return there
    return min(there, len(list(itertools.takewhile(re.compile(r" *(\d|GPU-|MIG-)").match, listed.split(",")))))


def memory_limit_bytes(groups: Path = _GROUPS, own: Path = _OWN) -> int | None:
    """The least memory limit of this process's control groups, in bytes; None without one."""
    return min((int(line) for line in _values("memory.max", groups, own) if line != "max"), default=None)


def memory_room_bytes(groups: Path = _GROUPS, own: Path = _OWN, meminfo: Path = _MEMINFO) -> float:
    """Bytes that further processes may take: what the machine has free, or what a control group leaves if that is less."""
    free = None
    with contextlib.suppress(OSError):
        free = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo.read_text(), re.MULTILINE)
    limits = zip(_values("memory.max", groups, own), _values("memory.stat", groups, own), strict=False)  # the root has no limit
    left = [int(most) - int(stat.split()[1]) for most, stat in limits if most != "max"]  # "anon <bytes>" comes first
    return min([1024.0 * int(free[1]) if free else math.inf, *left])


def _values(name: str, groups: Path, own: Path) -> Iterator[str]:
    """The content of a file of the own group, and of each group above it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for folder in (groups / path, *(groups / path).parents):
        if folder.is_relative_to(groups):
            with contextlib.suppress(OSError):  # the group lies outside of the container's view, or lacks this controller
                yield (folder / name).read_text().strip()


def resident_bytes(process: int | str = "self") -> int:
    """Bytes of a process in memory; 0 where the system does not tell."""
    try:
        with open(f"/proc/{process}/statm") as statm:
            return int(statm.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


class MemoryLimit:
    """The memory limit of this process.

    Attributes:
      limit_bytes: Most bytes of this process; None: no limit.
    """

    def __init__(self) -> None:
        self.limit_bytes = memory_limit_bytes()

    def narrow(self, limit_mb: int | None) -> None:
        """Sets a limit in megabytes; the control group's stays if it is less, or if none is given."""
        self.limit_bytes = min((each for each in (limit_mb and limit_mb * 10**6, memory_limit_bytes()) if each), default=None)

    def budget(self, most_bytes: float) -> float:
        """The bytes that a buffer may hold now: `most_bytes`, or a share of free memory if that is less."""
        if self.limit_bytes is None:
            return most_bytes
        return min(most_bytes, max(_LEAST_BYTES, (self.limit_bytes - resident_bytes()) * _SHARE))

    def room_bytes(self, process: int | str = "self") -> float:
        """What may be taken now: what this limit, the control group and the machine leave to a process."""
        own = math.inf if self.limit_bytes is None else self.limit_bytes - resident_bytes(process)
        return min(own, memory_room_bytes())


MEMORY = MemoryLimit()
