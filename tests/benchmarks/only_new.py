"""`--only-new` over a large ledger: time and peak memory, beside listing alone.

    python -m tests.benchmarks.only_new [--sizes 1000000,5000000] [--share 0.99]

The images are empty files in folders of 1,000; the ledger is made without a model: rows of 99 of 100 of them, in shards with
their indexes, as a batch job leaves them. Each figure is of a process of its own, and its peak that of the process (`ru_maxrss`):

- `list`: the files are listed, and that is all
- `all`: the steps of a job on the in-memory runner until images are read, without a ledger: listed, gathered, doubles dropped
- `new`: the same with the ledger, so that what comes out is what is new
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tests.benchmarks.images import BENCH

_SIZES = "1000000,5000000"
_PER_FOLDER = 1000
_PER_SHARD = 100_000
_MODEL = ("m", "1")
_WAYS = ("list", "all", "new")


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
    print(f"{'images':>9}  {'way':>5}  {'seconds':>7}  {'us/image':>8}  {'to list':>7}  {'images out':>10}  {'peak MB':>7}")
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
    """Lists, or lists and compares; seconds, and the peak of this process in MB; prints how many images come out."""
    from pipeline.read.list_images import list_images

    began = time.perf_counter()
    if way == "list":
        print(sum(1 for _ in list_images([str(images)])))
    else:
        _through_beam(images, output if way == "new" else None)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def _through_beam(images: Path, output: Path | None) -> None:
    """Prints how many images come out."""
    import apache_beam as beam
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner

    from pipeline.read.read_images import ReadImages
    from pipeline.results.completion import CompletionRule

    done = CompletionRule(_provenance()) if output else None
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _, distinct = ReadImages([str(images)], exclude=str(output or ""), done=done).list(pipeline)
        _ = distinct.refs | "CountAll" >> beam.combiners.Count.Globally() | "Print" >> beam.Map(print)


def _provenance() -> Any:
    from pipeline.results.completion import Provenance

    return Provenance("11111111", "22222222", *_MODEL)


def _made(size: int, share: float) -> tuple[Path, Path]:
    return BENCH / f"listed-{size}", BENCH / f"ledger-{size}-{share:g}"


def _make(size: int, share: float) -> None:
    """Makes the files and their ledger where they are not there yet."""
    images, output = _made(size, share)
    if not (listed := images.with_suffix(".made")).exists():
        for number in range(size):
            path = images / f"{number // _PER_FOLDER:05d}" / f"{number:08d}.jpg"
            if number % _PER_FOLDER == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        listed.touch()
    if not (output / "made").exists():
        _write_ledger(images, output, int(size * share))
        (output / "made").touch()


def _write_ledger(images: Path, output: Path, rows: int) -> None:
    from pipeline.results.ledger import writing_index

    from pipeline.results.layout import DETECTIONS, index_name, shard_name
    from pipeline.storage.files import create

    lines = _rows(images, rows)
    for shard in range(shards := -(-rows // _PER_SHARD)):
        name = f"{shard_name(DETECTIONS, shard, shards)}.jsonl"
        with create(f"{output}/{name}") as file, writing_index(f"{output}/{index_name(name)}", DETECTIONS, _provenance()) as note:
            file.writelines(map(note, islice(lines, _PER_SHARD)))


def _rows(images: Path, rows: int) -> Iterator[bytes]:
    from pipeline.read.list_images import list_images
    from pipeline.records import row_bytes

    model = {"name": _MODEL[0], "version": _MODEL[1]}
    for ref in islice(list_images([str(images)]), rows):
        image = {"uri": ref.uri, "generation": ref.generation, "width": 640, "height": 480}
        yield row_bytes({"image": image, "model": model, "detections": []}) + b"\n"


if __name__ == "__main__":
    main()
