"""Rows through `WriteFiles`: time for each and peak memory, at 300,000 rows and at ten times as many.

    python -m tests.benchmarks.rows [--rows 300000,3000000] [--parquet] [--coco]

The rows are made without a model: `DetectedImage`s with 0 to 9 boxes come in no order out of one fused step, as they do in a job
on the in-memory runner, so everything behind the detector works as it does there. Each size runs in a process of its own; the
peak is that of the process (`ru_maxrss`), and what it has after its imports stands beside it. Files are checked to be in order.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.benchmarks.images import BENCH

_SIZES = "300000,3000000"
_BLOCK = 10_000
OUT = BENCH / "out" / "rows"


def main() -> None:
    """Runs each size and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=_SIZES)
    parser.add_argument("--parquet", action="store_true")
    parser.add_argument("--coco", action="store_true")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(write(args.one, args.parquet, args.coco)))
        return
    flags = [flag for flag, wanted in (("--parquet", args.parquet), ("--coco", args.coco)) if wanted]
    print(f"{'rows':>9}  {'files':>5}  {'MB':>6}  {'us/row':>6}  {'MB at start':>11}  {'peak MB':>7}")
    for size in map(int, args.rows.split(",")):
        command = [sys.executable, "-m", "tests.benchmarks.rows", "--one", str(size), *flags]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        run = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{size:9}  {run['files']:5}  {run['bytes'] / 1e6:6.0f}  {run['seconds'] / size * 1e6:6.1f}  "
            f"{run['start_mb']:11.0f}  {run['peak_mb']:7.0f}",
            flush=True,
        )


def write(rows: int, parquet: bool, coco: bool) -> dict[str, Any]:
    """Writes so many rows, and measures it."""
    import apache_beam as beam
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner
    from pipeline.write.write_files import WriteFiles

    from pipeline.config import WriteConfig
    from pipeline.results.run import Run
    from pipeline.stats.summary import JobStats
    from pipeline.write.sink import Results

    shutil.rmtree(OUT, ignore_errors=True)
    staging, started, start_mb = Run.new(str(OUT)), time.monotonic(), _peak_mb()
    blocks = random.Random(0).sample(range(0, rows, _BLOCK), len(range(0, rows, _BLOCK)))
    with staging.held({}):
        with beam.Pipeline(runner=FnApiRunner()) as pipeline:
            detected = pipeline | beam.Create(blocks, reshuffle=False) | "Make" >> beam.FlatMap(_images, rows)
            dead = pipeline | "NoDead" >> beam.Create([])
            counted = pipeline | "Counted" >> beam.Create([JobStats(read=rows)])
            _ = Results(detected, (dead,), counted) | WriteFiles(staging, {}, WriteConfig(parquet=parquet, coco=coco))
        seconds = time.monotonic() - started
    files = sorted((OUT / "detections").glob("*.jsonl"))
    size = _check_order(files, rows)
    return {"files": len(files), "bytes": size, "seconds": seconds, "start_mb": start_mb, "peak_mb": _peak_mb()}


def _images(start: int, rows: int) -> Iterator[Any]:
    """The images of one block, in no order."""
    from pipeline.records import DetectedImage, Detections, ImageRef, Timing

    numbers = np.random.default_rng(start)
    for number in numbers.permutation(range(start, min(start + _BLOCK, rows))):
        boxes = int(numbers.integers(0, 10))
        found = Detections(
            numbers.uniform(0, 4000, (boxes, 4)).astype(np.float32),
            numbers.integers(0, 80, boxes).astype(np.int32),
            np.sort(numbers.uniform(0.25, 1, boxes).astype(np.float32))[::-1],
            ("traffic light",) * boxes,
        )
        ref = ImageRef(
            f"gs://bucket/raw/2026/11/{number % 28:02d}/camera-{number * 2654435761 % 2**32:010d}.jpg", "1795226400500000"
        )
        yield DetectedImage(ref, 4000, 3000, "yolov4", "1", found, Timing(latency=0.05, finished_at=1.8e9))


def _check_order(files: list[Any], rows: int) -> int:
    """Bytes of all files; they must hold every row once, in order over all of them."""
    last, found, size = b"", 0, 0
    for path in files:
        with path.open("rb") as lines:
            for line in lines:
                assert last < line, f"{path} is not in order"
                last, found, size = line, found + 1, size + len(line)
    assert found == rows, f"{found} rows of {rows}"
    return size


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
