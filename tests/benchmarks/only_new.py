"""What is done is left out, over many rows: CPU time, which other work on the machine changes little, and peak memory.

    python -m tests.benchmarks.only_new [--sizes 1000000,5000000]

The images are empty files in folders of 1,000; the rows are made without a model, of 99 of 100 of them, in shards as batch jobs
leave them. Each figure is of a process of its own, after its imports, and its peak that of the process (`ru_maxrss`):

- `list`: the files are listed, and that is all
- `new`: the steps of a job on the in-memory runner until images are read; what comes out is what is new
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

from tests.benchmarks.images import BENCH
from tests.benchmarks.results import table
from tests.shard_rows import VERSION, detected, write_rows

_PER_FOLDER = 1000
_PER_SHARD = 100_000
_WAYS = ("list", "new")


def main() -> None:
    """Makes what is missing, runs each way and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000000,5000000")
    parser.add_argument("--one", choices=_WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = list(map(int, args.sizes.split(",")))
    if args.one:
        measure(args.one, *_make(sizes[0]))
        return
    header, rows = ["images", "way", "CPU s", "us an image", "beside listing", "images out", "peak MB"], []
    for size in sizes:
        _make(size)
        listing = 0.0
        for way in _WAYS:
            command = ["-m", "tests.benchmarks.only_new", "--one", way, "--sizes", str(size)]
            run = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True)
            out, seconds, peak_mb = map(float, run.stdout.split()[-3:])
            listing = listing or seconds
            figures = (
                f"{seconds:.1f}",
                f"{seconds / size * 1e6:.1f}",
                f"{seconds / listing:.2f}",
                f"{out:.0f}",
                f"{peak_mb:.0f}",
            )
            rows.append([str(size), way, *figures])
    print(table(header, rows))


def measure(way: str, images: Path, output: Path) -> None:
    """Lists, or lists and compares; prints how many images come out, CPU seconds, and the peak of this process in MB."""
    import apache_beam as beam
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner

    from pipeline.listing.done_rows import DoneRows
    from pipeline.listing.list_images import list_images
    from pipeline.listing.read_images import ReadImages

    began = time.process_time()
    if way == "list":
        print(sum(1 for _ in list_images([str(images)])))
    else:
        with beam.Pipeline(runner=FnApiRunner()) as pipeline:
            done = DoneRows(str(output), VERSION)
            read = pipeline | ReadImages([str(images)], exclude=str(output), done=done)
            _ = read.images | "CountAll" >> beam.combiners.Count.Globally() | "Print" >> beam.Map(print)
    print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def _make(size: int) -> tuple[Path, Path]:
    """The folders of the files and of their rows, made where they are not there yet."""
    images, output = BENCH / f"listed-{size}", BENCH / f"shards-{size}"
    if not (listed := images.with_suffix(".made")).exists():
        for number in range(size):
            path = images / f"{number // _PER_FOLDER:05d}" / f"{number:08d}.jpg"
            if number % _PER_FOLDER == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        listed.touch()
    if not (output / "made").exists():
        _write_rows(images, output, size * 99 // 100)
        (output / "made").touch()
    return images, output


def _write_rows(images: Path, output: Path, rows: int) -> None:
    from pipeline.listing.list_images import list_images

    refs = islice(list_images([str(images)]), rows)
    while some := list(islice(refs, _PER_SHARD)):
        write_rows(str(output), [detected(ref.uri, ref.generation) for ref in some])


if __name__ == "__main__":
    main()
