"""What jobs take on this machine: processor time by kind of process, and on Flink the bytes that cross its shuffles."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from tests.flink.cluster import FlinkCluster, job_flags

WORKERS, LAUNCHER, TASKMANAGERS, SERVERS, PRISM = "workers", "launcher", "TaskManagers", "Flink's servers", "Prism"
# a process is of the first kind whose word is in its command line, else of its parent's
_KINDS = {
    "pipeline.run": LAUNCHER,  # before the workers, whose command is among its flags
    "/deploy/flink/worker": WORKERS,
    "TaskManagerRunner": TASKMANAGERS,
    "StandaloneSessionCluster": SERVERS,
    "JobServer": SERVERS,
    "pubsub-emulator": "emulator",
    "prism": PRISM,
}
_SAMPLE_SECONDS = 0.5
_FORWARD = "forward"
_COUNTS = "MergeStats"


class ProcessorTime:
    """Processor time of all that this process has started, by kind of process; use as a context manager around a run."""

    def __init__(self) -> None:
        self._of_process: dict[tuple[int, float], float] = {}  # of those that have ended, too
        self._kinds: dict[tuple[int, float], str] = {}
        self._samples: list[tuple[float, Counter[str]]] = []
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="processor time", daemon=True)

    def __enter__(self) -> ProcessorTime:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._left.set()
        self._thread.join()
        self._sample()

    def seconds(self, start: float = 0.0, end: float = float("inf")) -> dict[str, float]:
        """User and system seconds between two times, in seconds since the epoch; default: of the whole block."""
        at = [moment for moment, _ in self._samples]
        between = np.clip([start, end], at[0], at[-1])
        spent = {kind: np.interp(between, at, [sums[kind] for _, sums in self._samples]) for kind in self._samples[-1][1]}
        return {kind: float(after - before) for kind, (before, after) in spent.items()}

    def _watch(self) -> None:
        while not self._left.wait(_SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                key = process.pid, process.create_time()
                times = process.cpu_times()
                self._of_process[key] = times.user + times.system
                self._kinds[key] = _kind_of(process)  # anew each time: it may just have been forked, and become another one
        sums: Counter[str] = Counter()
        for key, seconds in self._of_process.items():
            sums[self._kinds.get(key, "")] += seconds  # type: ignore[assignment]
        self._samples.append((time.time(), sums))


def run_measured(command: Sequence[str], output: Path, **options: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """Runs a batch job; returns its summary, and the processor time of an image in milliseconds, by kind of process.

    The time is that of the work: from the first image that a detector takes to the published results.

    Args:
      command: The job.
      output: Its output.
      **options: Of `subprocess.run`.
    """
    with ProcessorTime() as spent:
        began = time.time()
        subprocess.run(command, check=True, **options)
    summary = json.loads((output / "summary.json").read_text())
    began += summary["startup_seconds"] + summary.get("submission_seconds", 0.0)
    seconds = spent.seconds(began, began + summary["wall_seconds"])
    return summary, {kind: 1e3 * value / summary["images"]["detected"] for kind, value in seconds.items()}


def _kind_of(process: psutil.Process) -> str:
    for each in (process, *process.parents()):
        line = " ".join(each.cmdline())
        for word, kind in _KINDS.items():
            if word in line:
                return kind
    return "others"


class Shuffled(NamedTuple):
    """What a step of a job got from other machines, or might have got.

    Attributes:
      step: Its name, as the job's dashboard shows it.
      how: `hash` or `rebalance`; `broadcast` to all slots.
      received_bytes: With all that Flink and Beam add to an element.
    """

    step: str
    how: str
    received_bytes: int

    @property
    def is_of_images(self) -> bool:
        """Whether it grows with the number of images; a job's counts, and thumbnails for its report, come once a bundle."""
        return self.how in ("hash", "rebalance") and _COUNTS not in self.step


def shuffled(flink: FlinkCluster, job: str) -> Iterator[Shuffled]:
    """What crosses the shuffles of a job, once it is over: what no step hands to the next one where it is itself."""
    found = flink.ask(f"/jobs/{job}")
    inputs = {node["id"]: [each["ship_strategy"].lower() for each in node.get("inputs", ())] for node in found["plan"]["nodes"]}
    for vertex in found["vertices"]:
        ways = {way.split()[0] for way in inputs[vertex["id"]]} - {_FORWARD}
        if ways:
            yield Shuffled(vertex["name"], "/".join(sorted(ways)), vertex["metrics"]["read-bytes"])


def on_flink(flink: FlinkCluster, **environment: str) -> list[str]:
    """The flags of any job on a cluster, a process a TaskManager as in `configs/`."""
    return ["--runner=FlinkRunner", "--parallelism=2", "--sdk_worker_parallelism=1", *job_flags(flink, **environment)]
