"""What is done is left out, over many rows: CPU time, which other work on the machine changes little, and peak memory.

    python -m tests.benchmarks.only_new [--sizes 1000000,5000000] [--share 0.99]

The images are empty files in folders of 1,000; the rows are made without a model, of 99 of 100 of them, in shards as batch jobs
leave them. Each figure is of a process of its own, after its imports, and its peak that of the process (`ru_maxrss`):

- `list`: the files are listed, and that is all
- `new`: the steps of a job on the in-memory runner until images are read; what comes out is what is new
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

from tests.benchmarks.images import BENCH

_SIZES = "1000000,5000000"
_PER_FOLDER = 1000
_PER_SHARD = 100_000
_MODEL = ("m", "1")
_WAYS = ("list", "new")


def main() -> None:
    """Makes what is missing, runs each way and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=_SIZES)
    parser.add_argument("--share", type=float, default=0.99, help="of the images that have a row")
    parser.add_argument("--one", choices=_WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = list(map(int, args.sizes.split(",")))
    if args.one:
        print(json.dumps(measure(args.one, *_made(sizes[0], args.share))))
        return
    print(f"{'images':>9}  {'way':>5}  {'CPU s':>7}  {'us/image':>8}  {'to list':>7}  {'images out':>10}  {'peak MB':>7}")
    for size in sizes:
        _make(size, args.share)
        listing = 0.0
        for way in _WAYS:
            command = ["-m", "tests.benchmarks.only_new", "--one", way, "--sizes", str(size), "--share", str(args.share)]
            run = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True)
            out, figures = run.stdout.splitlines()[-2:]
            done = json.loads(figures)
            listing = listing or done["seconds"]
            print(
                f"{size:9}  {way:>5}  {done['seconds']:7.1f}  {done['seconds'] / size * 1e6:8.1f}  "
                f"{done['seconds'] / listing:7.2f}  {out:>10}  {done['peak_mb']:7.0f}",
                flush=True,
            )


def measure(way: str, images: Path, output: Path) -> dict[str, Any]:
    """Lists, or lists and compares; CPU seconds, and the peak of this process in MB; prints how many images come out."""
    import apache_beam as beam
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner

    from pipeline.read.done_rows import DoneRows
    from pipeline.read.list_images import list_images
    from pipeline.read.read_images import ReadImages

    began = time.process_time()
    if way == "list":
        print(sum(1 for _ in list_images([str(images)])))
    else:
        with beam.Pipeline(runner=FnApiRunner()) as pipeline:
            done = DoneRows(str(output), _version())
            read = pipeline | ReadImages([str(images)], exclude=str(output), done=done, fetch=False)
            _ = read.images | "CountAll" >> beam.combiners.Count.Globally() | "Print" >> beam.Map(print)
    seconds = time.process_time() - began
    return {"seconds": seconds, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def _version() -> Any:
    from pipeline.results.completion import RowVersion

    return RowVersion(*_MODEL, "11111111", "22222222")


def _made(size: int, share: float) -> tuple[Path, Path]:
    return BENCH / f"listed-{size}", BENCH / f"shards-{size}-{share:g}"


def _make(size: int, share: float) -> None:
    """Makes the files and their rows where they are not there yet."""
    images, output = _made(size, share)
    if not (listed := images.with_suffix(".made")).exists():
        for number in range(size):
            path = images / f"{number // _PER_FOLDER:05d}" / f"{number:08d}.jpg"
            if number % _PER_FOLDER == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        listed.touch()
    if not (output / "made").exists():
        _write_rows(images, output, int(size * share))
        (output / "made").touch()


def _write_rows(images: Path, output: Path, rows: int) -> None:
    import numpy as np

    from pipeline.read.list_images import list_images
    from pipeline.records import DetectedImage, Detections
    from pipeline.results.rows import detections_table
    from pipeline.results.shards import write_shard

    none = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.int32), np.zeros(0, np.float32), ())
    refs = islice(list_images([str(images)]), rows)
    while some := list(islice(refs, _PER_SHARD)):
        records = [DetectedImage(ref, 640, 480, *_MODEL, none) for ref in sorted(some, key=lambda ref: ref.uri)]
        write_shard(str(output), "detections", detections_table(records, _version(), "0a1b", time.time()), "0a1b")


if __name__ == "__main__":
    main()
