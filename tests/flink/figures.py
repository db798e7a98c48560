"""Figures of jobs on a Flink cluster of this machine, a line each.

    .venv/bin/python -m tests.flink.figures [batch] [stream] [--rounds 2] [--quick]

    batch    images/s and CPU-ms an image of one job on the in-memory runner, on Prism, and on Flink with one TaskManager and with
             two, by turns; where the processor time goes; bytes that cross Flink's shuffles
    stream   on Flink with two TaskManagers: images/s of a backlog, latency from publishing to the answer for one image alone and
             at half of that rate, and bytes that cross shuffles

All of it shares this machine's cores: a second TaskManager brings none, so beside one it shows what it costs, not what it gains.
Work is counted from the first image that a detector takes to the published results; start-up stands beside it. Bytes are what a
step receives otherwise than from the step before it in its own machine, with all that Flink and Beam add.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.contenders import PRISM, ours
from tests.benchmarks.images import BENCH, SMALL, link_images, make_images
from tests.benchmarks.model import make_model
from tests.benchmarks.streaming import Bench
from tests.emulators import EmulatorMissing, running_pubsub_emulator
from tests.flink.cluster import FlinkCluster, FlinkMissing, running_flink
from tests.flink.usage import LAUNCHER, WORKERS, Shuffled, on_flink, run_measured, shuffled

_IN_MEMORY, _PRISM, _ONE, _TWO = "in memory", "Prism", "Flink, 1 TaskManager", "Flink, 2 TaskManagers"
_TASKMANAGERS = {_ONE: 1, _TWO: 2}
_OUT = BENCH / "out" / "flink"


class Run(NamedTuple):
    """One run of a batch job.

    Attributes:
      images_per_second: Over the work.
      startup_seconds: Until the first image is taken.
      cpu_ms: Milliseconds an image by kind of process, over the work.
      shuffled: What crossed the runner's shuffles, where it says.
    """

    images_per_second: float
    startup_seconds: float
    cpu_ms: dict[str, float]
    shuffled: list[Shuffled]


def main() -> int:
    """Takes the figures that are named, or all; returns the exit code."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("what", nargs="*", choices=["batch", "stream", []], help="default: both")
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument("--quick", action="store_true", help="small numbers, to see that it works")
    given = flags.parse_args()
    make_model()
    try:
        if "batch" in (given.what or ["batch"]):
            batch(128 if given.quick else 1024, given.rounds)
        if "stream" in (given.what or ["stream"]):
            stream(128 if given.quick else 1024, given.quick)
    except (FlinkMissing, EmulatorMissing) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    return 0


def batch(count: int, rounds: int) -> None:
    """Runs the job on each runner by turns, and prints a line for each run and each runner."""
    images = link_images(make_images(SMALL), BENCH / f"links-{count}", count)
    runs: dict[str, list[Run]] = defaultdict(list)
    for _ in range(rounds):
        for name in (_IN_MEMORY, *([_PRISM] if PRISM.exists() else []), _ONE, _TWO):
            runs[name].append(_run(name, images, count))
            print(f"batch of {count}, {name}: {_said(runs[name][-1:])}", flush=True)
    for name, done in runs.items():
        print(f"batch of {count}, {name}, median of {rounds}: {_said(done)}")
        if name != _IN_MEMORY:
            print(f"batch of {count}, {name} / {_IN_MEMORY}, by rounds: {_ratios(done, runs[_IN_MEMORY])}")
    print(f"batch of {count}, {_TWO} / {_ONE}, by rounds: {_ratios(runs[_TWO], runs[_ONE])}")
    _print_shuffled("batch", runs[_TWO][-1].shuffled, count, images)


def stream(count: int, quick: bool) -> None:
    """Runs a backlog, then a steady rate."""
    links = BENCH / f"links-{count}"
    with _cluster(2) as flink, running_pubsub_emulator() as emulator:
        flags = [*on_flink(flink, PUBSUB_EMULATOR_HOST=emulator.host), "--checkpointing_interval=10000"]
        flags += ["--model", str(make_model().resolve())]
        bench = Bench(emulator, quick, "FlinkRunner", *flags, answers=False)
        print(f"stream, backlog of {count}: {bench.backlog(count):.1f} images/s", flush=True)
        _print_shuffled("stream, images by their names", _of_latest(flink), count, links)
        found = bench.latency()
        print(f"stream, latency of one image alone: {_milliseconds(found['alone_ms'])}")
        print(f"stream, latency at {found['rate']:.1f} images/s, half of the backlog's rate: {_milliseconds(found['loaded_ms'])}")
        _print_shuffled("stream, images within their messages", _of_latest(flink), found["images"], links)


def _run(name: str, images: Path, count: int) -> Run:
    output = (_OUT / "batch").absolute()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        flink = stack.enter_context(_cluster(_TASKMANAGERS[name])) if name in _TASKMANAGERS else None
        flags = on_flink(flink) if flink else []
        flags += ["--runner=PrismRunner", f"--prism_location={PRISM.absolute()}"] if name == _PRISM else []
        with (_OUT / "log").open("ab") as log:
            summary, cpu_ms = run_measured(ours(*flags).command(images, output), output, stdout=log, stderr=log)
        moved = _of_latest(flink) if flink else []
    startup = summary["startup_seconds"] + summary.get("submission_seconds", 0.0)
    if summary["images"]["detected"] != count:
        raise SystemExit(f"{name}: expected {count} rows, got {summary['images']}")
    return Run(summary["images_per_second"], startup, cpu_ms, moved)


@contextlib.contextmanager
def _cluster(taskmanagers: int) -> Iterator[FlinkCluster]:
    with tempfile.TemporaryDirectory() as folder, running_flink(Path(folder), taskmanagers) as flink:
        yield flink


def _of_latest(flink: FlinkCluster) -> list[Shuffled]:
    return list(shuffled(flink, flink.jobs("FINISHED")[-1]))


def _said(runs: list[Run]) -> str:
    """Medians of some runs."""
    kinds = {kind: statistics.median(run.cpu_ms.get(kind, 0.0) for run in runs) for kind in runs[0].cpu_ms}
    parts = ", ".join(f"{_as_called(kind, kinds)} {value:.1f}" for kind, value in kinds.items() if value >= 0.05)
    rate, startup = (statistics.median(getattr(run, name) for run in runs) for name in ("images_per_second", "startup_seconds"))
    return f"{rate:.1f} images/s after {startup:.0f} s; CPU-ms an image {sum(kinds.values()):.1f}: {parts}"


def _as_called(kind: str, among: dict[str, float]) -> str:
    return "the job itself" if kind == LAUNCHER and WORKERS not in among else kind


def _ratios(runs: list[Run], others: list[Run]) -> str:
    rates = [run.images_per_second / other.images_per_second for run, other in zip(runs, others, strict=True)]
    times = [sum(run.cpu_ms.values()) / sum(other.cpu_ms.values()) for run, other in zip(runs, others, strict=True)]
    return f"images/s {_listed(rates)}, CPU time {_listed(times)}"


def _listed(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def _print_shuffled(what: str, steps: list[Shuffled], count: int, images: Path) -> None:
    """A line for each shuffle, bytes an image, and one for the images themselves."""
    for step in steps:
        print(f"{what}, through a shuffle ({step.how}): {step.received_bytes / count:.0f} bytes an image, to {step.step[:80]}")
    mean, moved = statistics.mean(path.stat().st_size for path in images.iterdir()), sum(step.received_bytes for step in steps)
    print(f"{what}, through all shuffles: {moved / count:.0f} bytes an image; images have {mean:.0f} themselves")


def _milliseconds(figures: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.0f} ms" for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
