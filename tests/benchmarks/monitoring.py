"""What metrics, live page and JSON logs cost a batch job.

    python -m tests.benchmarks.monitoring [--rounds 4] [--count 512] [--long 8000] [--turn-s 10] [--accept-noise]

Throughput and CPU time: one long job serves metrics and page; turns in which both are read alternate with turns in which nobody
reads them. Each turn is compared with its two neighbours, so what changes on the machine over minutes does not count. A port that
nobody reads costs nothing: its thread waits.

Memory: the same job with all of it and with none, by turns. Ratios and differences are taken within a round.

In both, a reader does more than production does: it reads `/metrics`, `/livez` and `/readyz` every five seconds (Prometheus reads
the first of them every 15 s, Kubernetes the others every 10 s), and the page's event stream without a pause.

Targets: at least 0.99 of the throughput, at most 20 MB. Figures go to `.bench/monitoring.json`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import itertools
import json
import os
import shutil
import statistics
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.benchmarks.contenders import ours
from tests.benchmarks.images import BENCH, COUNTS, SMALL, link_images, make_images
from tests.benchmarks.model import make_model
from tests.benchmarks.rounds import run_rounds
from tests.emulators import free_ports
from tests.monitoring.prometheus import samples_of
from tests.processes import running

WITHOUT, WITH = "without monitoring", "with monitoring"
_EVERY_SECONDS = 5.0
_PATHS = ("/metrics", "/livez", "/readyz")
_FULL_SPEED = 100  # images, after which the job is at full speed


def main() -> None:
    """Runs both and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--count", type=int, default=COUNTS[SMALL])
    parser.add_argument("--long", type=int, default=8000, help="images of the long job")
    parser.add_argument("--turn-s", type=float, default=10.0, help="seconds that metrics and page are read, and then are not")
    parser.add_argument("--accept-noise", action="store_true", help="take noisy runs as they are")
    args = parser.parse_args()
    make_model()
    small = make_images(SMALL)
    metrics, page = free_ports(2)
    flags = ("--metrics-port", metrics, "--metrics-host", "127.0.0.1", "--page-port", page, "--log-format", "json")
    command = ours(*map(str, flags))
    links = link_images(small, BENCH / "out" / "monitored-long", args.long)
    figures = _read_by_turns(command.command(links, BENCH / "out" / "monitored"), metrics, page, args.turn_s)

    images = link_images(small, BENCH / "out" / "monitored-images", args.count)
    contenders = {WITHOUT: ours(), WITH: command}
    with _reading(metrics, page):
        runs = run_rounds(contenders, images, args.count, args.rounds, args.accept_noise, BENCH / "out" / "monitoring")
    peaks = {(run.round, run.contender): run.peak_rss_mb for run in runs}
    more = [round(peaks[number, WITH] - peaks[number, WITHOUT], 1) for number in range(args.rounds)]
    figures["more_mb"] = {"median": statistics.median(more), "all": more}
    (BENCH / "monitoring.json").write_text(json.dumps(figures, indent=2))
    print(json.dumps(figures, indent=2))


class _Progress(NamedTuple):
    """What a job has done by a moment."""

    at: float
    images: float
    cpu_seconds: float


def _read_by_turns(command: list[str], metrics: int, page: int, turn_s: float) -> dict[str, Any]:
    """Throughput and CPU time of an image while a job is read, each divided by those of the turns before and after."""
    shutil.rmtree(BENCH / "out" / "monitored", ignore_errors=True)
    speeds: list[tuple[float, float]] = []  # images a second and CPU-seconds an image; nobody reads in the first turn
    with open(os.devnull, "wb") as nowhere, running(command, stdout=nowhere, stderr=subprocess.STDOUT) as job:
        while (now := _progress(metrics)) is None or now.images < _FULL_SPEED:
            if job.poll() is not None:
                raise SystemExit(f"the job ended with {job.returncode} before it was at full speed")
            time.sleep(1)
        for number in itertools.count():
            with _reading(metrics, page) if number % 2 else contextlib.nullcontext():
                before = _progress(metrics)
                time.sleep(turn_s)
                after = _progress(metrics)
            if not before or not after:
                break
            images = max(after.images - before.images, 1)
            speeds.append((images / (after.at - before.at), (after.cpu_seconds - before.cpu_seconds) / images))
    read = range(1, len(speeds) - 1, 2)
    ratios = {
        name: [speeds[n][which] / statistics.mean((speeds[n - 1][which], speeds[n + 1][which])) for n in read]
        for which, name in enumerate(("throughput_ratio", "cpu_ratio"))
    }
    return {name: _spread(values) for name, values in ratios.items()}


def _spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles, and the standard error of the mean."""
    low, median, high = statistics.quantiles(values, n=4)
    error = statistics.stdev(values) / len(values) ** 0.5
    names = ("median", "quartile_1", "quartile_3", "mean", "standard_error")
    return {
        "turns": len(values),
        **{name: round(value, 4) for name, value in zip(names, (median, low, high, statistics.mean(values), error), strict=True)},
    }


def _progress(metrics: int) -> _Progress | None:
    """What the job has done by now; None if it serves no metrics."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        samples = samples_of(metrics)
        detected = sum(
            value for (name, *labels), value in samples.items() if name == "detection_images_total" and "detected" in labels
        )
        return _Progress(time.monotonic(), detected, samples["process_cpu_seconds_total",])
    return None


@contextlib.contextmanager
def _reading(metrics: int, page: int) -> Iterator[collections.Counter[str]]:
    """Scrapes the metrics and follows the page while the block lasts; counts what answered, by path."""
    answers: collections.Counter[str] = collections.Counter()
    left = threading.Event()

    def read(port: int, paths: tuple[str, ...]) -> None:
        while not left.is_set():
            for path in paths:
                with (
                    contextlib.suppress(OSError, http.client.HTTPException),
                    urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer,
                ):
                    for _ in answer:  # an event stream goes on until the job ends
                        if left.is_set():
                            return
                    answers[path] += 1
            left.wait(_EVERY_SECONDS)

    threads = [threading.Thread(target=read, args=work, daemon=True) for work in ((metrics, _PATHS), (page, ("/", "/events")))]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        left.set()


if __name__ == "__main__":
    main()
