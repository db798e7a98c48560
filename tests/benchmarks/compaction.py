"""Rows through `pipeline.compact` and `pipeline.reconcile`: time for each and peak memory, at 300,000 and at ten times as many.

    python -m tests.benchmarks.compaction [--rows 300000,3000000]

The rows are made without a model, with 0 to 9 boxes, and lie in shards of 3,000, as a stream leaves them, without views; one in a
hundred stands in two shards. The listing is a manifest that names the same images and one in a hundred more. Each step runs in a
process of its own; the peak is that of the process (`ru_maxrss`), and what it has after its imports stands beside.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline.records import DetectedImage, Detections, ImageRef
from tests.benchmarks.images import BENCH

_SIZES = "300000,3000000"
_IN_A_FILE = 3000
OUT = BENCH / "out" / "compaction"


def main() -> None:
    """Runs each step of each size and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=_SIZES)
    parser.add_argument("--step", choices=_STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print(json.dumps(_STEPS[args.step](int(args.rows))))
        return
    print(f"{'rows':>9}  {'step':>9}  {'us/row':>6}  {'of CPU':>6}  {'MB at start':>11}  {'peak MB':>7}")
    for size in args.rows.split(","):
        for step in _STEPS:
            command = [sys.executable, "-m", "tests.benchmarks.compaction", "--rows", size, "--step", step]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            run = json.loads(done.stdout.splitlines()[-1])
            each = f"{run['seconds'] / int(size) * 1e6:6.1f}  {run['cpu_seconds'] / int(size) * 1e6:6.1f}"
            figures = f"{each}  {run['start_mb']:11.0f}  {run['peak_mb']:7.0f}"
            print(f"{size:>9}  {step:>9}  {figures}", flush=True)
    shutil.rmtree(OUT, ignore_errors=True)


def make(rows: int) -> dict[str, Any]:
    """Writes the shards and the manifest."""
    from pipeline.results.completion import RowVersion
    from pipeline.results.layout import DETECTIONS
    from pipeline.results.rows import detections_table
    from pipeline.results.shards import write_shard

    shutil.rmtree(OUT, ignore_errors=True)
    started, start_mb = (time.monotonic(), time.process_time()), _peak_mb()
    version, files = RowVersion("yolov4", "1", "5e771265", "5e771266"), -(-rows // _IN_A_FILE)
    for number in range(files):
        images = sorted(_images(number, files, rows), key=lambda image: image.ref.uri)
        write_shard(f"{OUT}/rows", DETECTIONS, detections_table(images, version, "0a1b", float(number)), "0a1b")
    with open(OUT / "listing.txt", "w") as listing:
        listing.writelines(f"{_uri(number)}\n" for number in range(rows + rows // 100))
    return _figures(started, start_mb)


def compacted(rows: int) -> dict[str, Any]:
    """Compacts them."""
    from pipeline.results.compact import compact

    started, start_mb = (time.monotonic(), time.process_time()), _peak_mb()
    done = compact(f"{OUT}/rows")
    assert (done.rows, done.dropped) == (rows, rows // 100), done
    return _figures(started, start_mb)


def reconciled(rows: int) -> dict[str, Any]:
    """Reconciles them with the listing."""
    from pipeline.read.reconciled import reconcile

    started, start_mb = (time.monotonic(), time.process_time()), _peak_mb()
    outcome = reconcile([f"{OUT}/listing.txt"], f"{OUT}/rows")
    assert (outcome.counts["done"], outcome.counts["missing"]) == (rows, rows // 100), outcome.counts
    return _figures(started, start_mb)


_STEPS = {"make": make, "compact": compacted, "reconcile": reconciled}


def _images(file: int, files: int, rows: int) -> Iterator[DetectedImage]:
    """The rows of one file: images of all days; of each hundredth image also the file after has a row."""
    for number in (*range(file, rows, files), *range((file - 1) % files, rows, files * 100)):
        boxes = np.tile(np.array([1234.56, 7.89, 2345.67, 890.12], np.float32), (number % 10, 1))
        ids, confidences = np.full(number % 10, 9, np.int32), np.full(number % 10, 0.98765, np.float32)
        found = Detections(boxes, ids, confidences, ("traffic light",) * (number % 10))
        yield DetectedImage(ImageRef(_uri(number), "1795226400500000"), 4000, 3000, "yolov4", "1", found)


def _uri(number: int) -> str:
    return f"gs://bucket/raw/2026/11/{number % 28 + 1:02d}/camera-{number * 2654435761 % 2**32:010d}.jpg"


def _figures(started: tuple[float, float], start_mb: float) -> dict[str, float]:
    wall, cpu = started
    used = {"seconds": time.monotonic() - wall, "cpu_seconds": time.process_time() - cpu}
    return {**used, "start_mb": start_mb, "peak_mb": _peak_mb()}


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
