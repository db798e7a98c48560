"""Rows through `WriteShards`: time for each and peak memory, at 300,000 rows and at ten times as many.

    python -m tests.benchmarks.rows [--rows 300000,3000000] [--no-view]

The rows are made without a model: `DetectedImage`s with 0 to 9 boxes come in no order out of one fused step, as they do in a job
on the in-memory runner, so everything behind the detector works as it does there. Each size runs in a process of its own; the
peak is that of the process (`ru_maxrss`), and what it has after its imports stands beside it. All rows are counted at the end.
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
    parser.add_argument("--no-view", action="store_true", help="without the JSON Lines beside the shards")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(write(args.one, not args.no_view)))
        return
    flags = ["--no-view"] if args.no_view else []
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


def write(rows: int, view: bool) -> dict[str, Any]:
    """Writes so many rows, and measures it."""
    import apache_beam as beam
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner

    from pipeline.config import WriteConfig
    from pipeline.results.completion import RowVersion
    from pipeline.results.run import Run
    from pipeline.results.shards import list_shards, read_batches
    from pipeline.stats.summary import JobStats
    from pipeline.write.sink import Results
    from pipeline.write.write_shards import WriteShards

    shutil.rmtree(OUT, ignore_errors=True)
    run, started, start_mb = Run.new(str(OUT)), time.monotonic(), _peak_mb()
    blocks = random.Random(0).sample(range(0, rows, _BLOCK), len(range(0, rows, _BLOCK)))
    with run.opened():
        with beam.Pipeline(runner=FnApiRunner()) as pipeline:
            detected = pipeline | beam.Create(blocks, reshuffle=False) | "Make" >> beam.FlatMap(_images, rows)
            dead = pipeline | "NoDead" >> beam.Create([])
            counted = pipeline | "Counted" >> beam.Create([JobStats(read=rows)])
            _ = Results(detected, (dead,), counted) | WriteShards(
                run, RowVersion("yolov4", "1", "1", "2"), WriteConfig(view=view)
            )
        seconds = time.monotonic() - started
    files = list((OUT / "detections").iterdir())
    written = sum(len(batch) for shard in list_shards(str(OUT)) for batch in read_batches(shard, ["key"]))
    assert written == rows, f"{written} rows of {rows}"
    size = sum(path.stat().st_size for path in files)
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


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
