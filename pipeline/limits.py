"""What this process may use: its share of the machine, of the container's CPU quota and of its memory.

https://docs.kernel.org/admin-guide/cgroup-v2.html: `cpu.max` holds quota and period, `memory.max` bytes; a group never gets
more than the groups above it. Version 1 has the same in other files.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import math
import os
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LEAST_BYTES = 1_000_000.0  # an image always gets through, one at a time
_QUARTER = 0.25  # of free memory for one buffer of images: there are four
_NO_LIMIT = 1 << 60  # of cgroups v1, which has a number for it
_SINGLE_GPU = (
    "/usr/lib/wsl/lib/libcuda.so.1",
    "/dev/nvhost-gpu",
    "/dev/nvgpu",
)  # of WSL2 and of Jetson, which have no /dev/nvidia0
PROCESSES = "DETECTION_PROCESSES"  # a variable of the environment: how many processes of a job a launcher starts on this host
# a process's number on its host, and how many there are: of our launcher (the number ends Beam's name of a worker), and of
# torchrun; SLURM divides cores and GPUs itself, by affinity and CUDA_VISIBLE_DEVICES
_SHARES = (("WORKER_ID", PROCESSES), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))


class Share(NamedTuple):
    """Which part of its host a process may use.

    Attributes:
      number: Which of the processes it is, from 0.
      of: How many divide the host.
    """

    number: int = 0
    of: int = 1

    @classmethod
    def of_environment(cls) -> Share:
        """As the launcher of this process says; all of the host if it says nothing."""
        for names in _SHARES:
            number, many = (re.search(r"\d+$", os.environ.get(name, "")) for name in names)
            if number and many and int(many[0]) > 0:
                return cls(int(number[0]) % int(many[0]), int(many[0]))
        return cls()

    def part(self, whole: int) -> int:
        """This process's part of things that cannot be divided, such as cores; the first processes get what is left over."""
        return whole // self.of + (self.number < whole % self.of)


def available_cpus(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """CPUs that this process may use: its share of those of its affinity, or of its quota, rounded up, if that is less.

    Args:
      groups: Where control groups are mounted.
      own: The file that names the group of this process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [line.split() for line in _values("cpu.max", groups, own)]
    v1 = (_values(f"cpu.cfs_{name}_us", groups, own, "cpu") for name in ("quota", "period"))
    limits += [list(both) for both in zip(*v1, strict=False)]
    quotas = [math.ceil(int(quota) / int(period)) for quota, period in limits if quota not in ("max", "-1")]
    return max(1, Share.of_environment().part(min([cores, *quotas])))


def machine() -> str:
    """What decides the speed here: processor, CPUs that may be used, and NVIDIA's devices."""
    model = None
    with contextlib.suppress(OSError):
        model = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    gpus = nvidia_gpus()
    processor = " ".join(model[1].split()) if model else platform.machine()
    return f"{processor}, {available_cpus()} CPUs" + (f", {gpus} GPUs" if gpus else "")


def nvidia_gpus(devices: str = "/dev/nvidia[0-9]*", single: Sequence[str] = _SINGLE_GPU) -> int:
    """NVIDIA's GPUs that this process may use: of the devices, those that `CUDA_VISIBLE_DEVICES` lists before a wrong entry.

    CUDA shows a process one part of a GPU (MIG), however many are listed:
    https://docs.nvidia.com/datacenter/tesla/mig-user-guide/mig-device-names.html#cuda-device-enumeration

    Args:
      devices: Pattern of their files.
      single: Files one of which is there instead, on a machine with one GPU.
    """
    there, listed = len(glob.glob(devices)) or int(any(map(os.path.exists, single))), os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return there
    entries = list(itertools.takewhile(re.compile(r" *(\d|GPU-|MIG-)").match, listed.split(",")))
    return min(there, 1 if "MIG-" in listed and entries else len(entries))


def memory_limit_bytes(groups: Path = _GROUPS, own: Path = _OWN) -> int | None:
    """The least memory limit of this process's control groups, in bytes; None without one."""
    return min((most for most, _ in _memory_groups(groups, own)), default=None)


def memory_room_bytes(groups: Path = _GROUPS, own: Path = _OWN, meminfo: Path = _MEMINFO) -> float:
    """Bytes that further processes may take: what the machine has free, or what a control group leaves if that is less."""
    free = None
    with contextlib.suppress(OSError):
        free = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo.read_text(), re.MULTILINE)
    left = [most - taken for most, taken in _memory_groups(groups, own)]
    return min([1024.0 * int(free[1]) if free else math.inf, *left])


def _memory_groups(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Of each control group with a limit of memory: the limit, and what its processes hold that cannot be dropped, bytes."""
    for names in (("memory.max", "", ("anon", "shmem")), ("memory.limit_in_bytes", "memory", ("total_rss", "total_shmem"))):
        limit, controller, held = names
        for most, stat in zip(
            _values(limit, groups, own, controller), _values("memory.stat", groups, own, controller), strict=False
        ):
            if most != "max" and int(most) < _NO_LIMIT:
                counted = dict(line.split() for line in stat.splitlines())
                yield int(most), sum(int(counted.get(name, 0)) for name in held)


def _values(name: str, groups: Path, own: Path, controller: str = "") -> Iterator[str]:
    """The content of a file of the own group, and of each group above it; of version 1 with its controller."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return
    path = next((line[2].lstrip("/") for line in lines if controller in line[1].split(",")), "")
    groups = groups / controller
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
        self.limit_bytes: int | None = None
        self.narrow(None)

    def narrow(self, limit_mb: int | None) -> None:
        """Sets a limit in megabytes; the share of the control group's stays if it is less, or if none is given."""
        group = (memory_limit_bytes() or 0) // Share.of_environment().of
        self.limit_bytes = min((each for each in (limit_mb and limit_mb * 10**6, group) if each), default=None)

    def budget(self, most_bytes: float = math.inf) -> float:
        """The bytes that a buffer may hold now: `most_bytes`, or if that is less or not given, a share of free memory."""
        if most_bytes == math.inf:
            return max(_LEAST_BYTES, self.room_bytes() * _QUARTER)
        if self.limit_bytes is None:
            return most_bytes
        return min(most_bytes, max(_LEAST_BYTES, (self.limit_bytes - resident_bytes()) * _QUARTER))

    def room_bytes(self, process: int | str = "self") -> float:
        """What may be taken now, bytes: what this limit leaves to a process, or less: its share of what group and machine do."""
        own = math.inf if self.limit_bytes is None else self.limit_bytes - resident_bytes(process)
        return min(own, memory_room_bytes() / Share.of_environment().of)


MEMORY = MemoryLimit()
