"""Runs a command and watches memory and CPU of its process tree."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from tests.processes import end_group, running


class Watched(NamedTuple):
    """A command that has ended."""

    exit_code: int  # negative where a signal ended it
    output: str  # on stdout and stderr
    started_at: float  # seconds since the epoch
    peak_rss_mb: float  # highest sum of its processes' resident memory; pages that they share count for each
    samples: list[tuple[float, float]]  # time, CPU seconds of its processes until then
    first_row_at: float  # the time of the first sample at which it had written a row, or of its end

    def cpu_seconds(self, start: float, end: float) -> float:
        """CPU seconds (user and system) that its processes used between two times."""
        at, cpu = zip(*self.samples, strict=True)
        return float(np.interp(end, at, cpu) - np.interp(start, at, cpu))


def watch(
    command: Sequence[str],
    log: Path,
    timeout_s: float,
    environment: Mapping[str, str],
    has_row: Callable[[], bool],
    sample_s: float = 0.5,
) -> Watched:
    """Runs a command to its end, or ends it with all its processes after `timeout_s`; looks at them every `sample_s`."""
    environment = {**os.environ, **environment}
    with (
        log.open("w", encoding="utf-8") as sink,
        running(command, stdout=sink, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        root = psutil.Process(process.pid)
        started_at, peak, samples, first_row_at = root.create_time(), 0.0, [], 0.0
        cpu_of: dict[int, float] = {}  # of ended processes too
        while process.poll() is None:
            peak = max(peak, _sample_tree(root, cpu_of))
            samples.append((time.time(), sum(cpu_of.values())))
            if not first_row_at and has_row():
                first_row_at = time.time()
            if time.time() - started_at > timeout_s:
                end_group(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(sample_s)
        samples.append((time.time(), sum(cpu_of.values())))
    output = log.read_text(encoding="utf-8", errors="replace")
    return Watched(process.returncode, output, started_at, peak / 1e6, samples, first_row_at or samples[-1][0])


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
