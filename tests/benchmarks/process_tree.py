"""Runs a command and watches it: memory and CPU of its process tree, and the CPU that everything else on the machine uses
meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import psutil

from tests.processes import end_group, running

_SAMPLE_SECONDS = 0.5


class _Sample(NamedTuple):
    at: float
    tree_cpu: float
    other_cpu: float


@dataclasses.dataclass
class Watched:
    """A command that has ended.

    Attributes:
      exit_code: Its exit code; negative where a signal ended it.
      output: What it wrote to stdout and stderr.
      started_at: When its process started, seconds since the epoch.
      peak_rss_mb: Highest sum of the resident memory of its processes (pages that they share count once for each).
    """

    exit_code: int
    output: str
    started_at: float
    peak_rss_mb: float
    samples: list[_Sample]

    def cpu_seconds(self, start: float, end: float) -> float:
        """CPU seconds (user and system) that its processes used between two times."""
        return self._between("tree_cpu", start, end)

    def other_cpus(self, start: float, end: float) -> float:
        """CPUs that other processes kept busy between two times."""
        return max(0.0, self._between("other_cpu", start, end)) / (end - start)

    def _between(self, name: str, start: float, end: float) -> float:
        at, value = [sample.at for sample in self.samples], [getattr(sample, name) for sample in self.samples]
        return float(np.interp(end, at, value) - np.interp(start, at, value))


def watch(command: Sequence[str], log: str, env: Mapping[str, str], timeout_s: float) -> Watched:
    """Runs a command to its end, or ends it with all its processes after `timeout_s`."""
    with (
        open(log, "w", encoding="utf-8") as sink,
        running(command, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, **env}) as process,
    ):
        root = psutil.Process(process.pid)
        started_at, peak, samples = root.create_time(), 0.0, []
        cpu_of: dict[int, float] = {}  # of ended processes too
        while process.poll() is None:
            peak = max(peak, _sample_tree(root, cpu_of))
            samples.append(_take_sample(cpu_of))
            if time.time() - started_at > timeout_s:
                end_group(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SAMPLE_SECONDS)
        samples.append(_take_sample(cpu_of))
    with open(log, encoding="utf-8", errors="replace") as written:
        return Watched(process.returncode, written.read(), started_at, peak / 1e6, samples)


def busy_cpus(seconds: float) -> float:
    """CPUs that all processes keep busy, over a while."""
    start, started_at = _busy_seconds(), time.time()
    time.sleep(seconds)
    return (_busy_seconds() - start) / (time.time() - started_at)


def _sample_tree(root: psutil.Process, cpu_of: dict[int, float]) -> float:
    """Notes the CPU time of each process of the tree; returns their resident bytes."""
    rss = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                cpu_of[process.pid] = times.user + times.system
                rss += process.memory_info().rss
    return rss


def _take_sample(cpu_of: Mapping[int, float]) -> _Sample:
    tree, own = sum(cpu_of.values()), psutil.Process().cpu_times()
    return _Sample(time.time(), tree, _busy_seconds() - tree - own.user - own.system)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    waiting = ("idle", "iowait", "guest", "guest_nice")  # guests' time is part of user's
    return float(sum(value for name, value in times._asdict().items() if name not in waiting))
