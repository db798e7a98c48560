"""How fast one process feeds a device: the pipeline with an engine that costs nothing, beside a loop of read, decode, resize.

    python -m tests.benchmarks.feeding [--rounds 3] [--json FILE] [--only tiny --candidates 60]

The engine finds ten objects in each image at once, or returns `--candidates` boxes around ten objects for the pipeline to
suppress. What is left is the pipeline: listing, reading, decoding, batches, boxes, rows, statistics. The loop reads, decodes and
resizes in as many threads as cores, and does nothing else. Both take turns.

| name | images |
|---|---|
| small | 640x480, from disk |
| tiny | 96x96, from disk |
| storage | 640x480, from an emulator of Cloud Storage on the same cores; the loop reads from disk |
| device | 640x480, from disk; the engine takes 32 images in the time of 0.7 of what the loop allows, sleeping |

`detecting_cpu_ms` is the CPU time that one more image takes of the process that detects: of all images, less that of a job of one
image, which starts Beam. The feeder processes are not in it. `busy` is the share of time between the first batch and the last one
in which the engine works.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import apache_beam as beam
import cv2
import numpy as np
import pytest

from pipeline.config import DetectConfig, ReadConfig, WriteConfig
from pipeline.detect.batcher import Batcher
from pipeline.detect.detect_objects import DetectObjects
from pipeline.detect.loaded_model import LoadedModel
from pipeline.limits import available_cpus
from pipeline.listing.read_images import ReadImages
from pipeline.outcome.write_shards import Results, WriteShards
from pipeline.results.completion import RowVersion
from pipeline.results.run_folder import Run
from pipeline.runners.in_memory import InMemoryRunner
from tests.benchmarks.free_engine import BOXES, HW, METADATA, OBJECTS, FreeEngine
from tests.benchmarks.results import table
from tests.emulator_fixtures import new_bucket
from tests.emulators import running_strict_gcs_emulator

# enough images that what a job takes once, such as building Beam's graph, is little of its time
SIZES = {"small": ((640, 480), 16384), "tiny": ((96, 96), 65536), "storage": ((640, 480), 4096), "device": ((640, 480), 16384)}
_RANDOM = np.random.default_rng(0)


ENGINE = FreeEngine()


def free_model(_detect: DetectConfig) -> LoadedModel:
    """The model of `ENGINE`; the process keeps its detector for all rounds."""
    metadata = dataclasses.replace(METADATA, nms="pipeline") if ENGINE.raw else METADATA
    return LoadedModel(metadata, "1", Batcher(ENGINE, HW))


def raw_outputs(candidates: int) -> dict[str, np.ndarray]:
    """Candidates of each of 32 images, around ten objects of 80 classes, as the steps behind YOLOv8 return them."""
    objects = np.resize(np.arange(OBJECTS), candidates)
    moved = _RANDOM.uniform(-3, 3, (32, candidates, 4)).astype(np.float32)
    return {
        "boxes": BOXES[objects] + moved,
        "scores": _RANDOM.uniform(0.3, 0.9, (32, candidates)).astype(np.float32),
        "classes": np.stack([_RANDOM.integers(0, 80, OBJECTS, np.int32)[objects] for _ in range(32)]),
        "count": np.full(32, candidates),
    }


def detect(images: str, output: str) -> None:
    """Detects in all images and writes the rows."""
    run = Run(f"{output}/{time.time_ns()}", "run")
    with run.opened(), beam.Pipeline(runner=InMemoryRunner()) as pipeline:
        read = pipeline | ReadImages([images], rebalance=False)
        found = read.images | DetectObjects(free_model, read=ReadConfig())
        results = Results(found.detected, (read.dead, found.dead), read.counted)
        _ = results | WriteShards(run, RowVersion("free", "1"), WriteConfig())


def make_images(folder: Path, wh: tuple[int, int], count: int) -> None:
    """Writes JPEGs: 64 different ones, under many names."""
    folder.mkdir(parents=True)
    for number in range(count):
        path = folder / f"{number:05}.jpg"
        if number < 64:
            noise = _RANDOM.integers(0, 255, (wh[1] // 8, wh[0] // 8, 3), np.uint8)
            cv2.imwrite(str(path), cv2.resize(noise, wh, interpolation=cv2.INTER_CUBIC), [cv2.IMWRITE_JPEG_QUALITY, 90])
        else:
            path.hardlink_to(folder / f"{number % 64:05}.jpg")


def loop(folder: Path) -> float:
    """Images per second of the plain loop."""

    def prepare(path: Path) -> int:
        pixels = cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), cv2.IMREAD_COLOR_RGB)
        return cv2.resize(pixels, HW[::-1]).nbytes

    cv2.setNumThreads(1)
    paths, began = sorted(folder.iterdir()), time.monotonic()
    with ThreadPoolExecutor(available_cpus()) as pool:
        done = sum(1 for _ in pool.map(prepare, paths))
    return done / (time.monotonic() - began)


@contextmanager
def uploaded(folder: Path) -> Iterator[str]:
    """The images on the emulator of Cloud Storage."""
    with running_strict_gcs_emulator() as url, pytest.MonkeyPatch.context() as patch:
        bucket = new_bucket(url, patch)
        for path in folder.iterdir():
            bucket.blob(path.name).upload_from_filename(str(path))
        yield f"gs://{bucket.name}/"


def cpu_of(images: str, output: str) -> float:
    """CPU seconds of this process for detecting in all images."""
    before = time.process_time()
    detect(images, output)
    return time.process_time() - before


def measure(name: str, folder: Path, images: str, output: str, rounds: int) -> dict[str, Any]:
    """The medians of one kind of images."""
    count = SIZES[name][1]
    ENGINE.seconds = 32 / (0.7 * loop(folder)) if name == "device" else 0.0
    detect(f"{images}00000.jpg", output)  # loads what is loaded once
    started = cpu_of(f"{images}00000.jpg", output)
    figures = []
    for _ in range(rounds):
        of_loop, ENGINE.worked = loop(folder), []
        began = time.monotonic()
        cpu = cpu_of(images, output) - started
        wall = time.monotonic() - began
        begins, ends = np.transpose(ENGINE.worked)
        figures.append((cpu * 1e3 / (count - 1), count / wall, of_loop, (ends - begins).sum() / (ends.max() - begins.min())))
    cpu_ms, rate, of_loop, busy = (statistics.median(column) for column in zip(*figures, strict=True))
    return {
        "name": name,
        "detecting_cpu_ms": round(cpu_ms, 3),
        "images_per_second": round(rate, 1),
        "loop_images_per_second": round(of_loop, 1),
        "busy": round(busy, 3) if name == "device" else None,
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=SIZES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--candidates", type=int)
    args = parser.parse_args()
    ENGINE.raw = raw_outputs(args.candidates) if args.candidates else {}
    found, rows = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for name in [args.only] if args.only else SIZES:
            wh, count = SIZES[name]
            make_images(folder := Path(temporary, name), wh, count)
            with uploaded(folder) if name == "storage" else nullcontext(f"{folder}/") as images:
                found.append(measure(name, folder, images, temporary, args.rounds))
    for each in found:
        rate, busy = each["images_per_second"], "" if each["busy"] is None else f"{each['busy']:.2f}"
        of_loop = f"{rate / each['loop_images_per_second']:.2f}"
        rows.append([each["name"], f"{each['detecting_cpu_ms']:.3f}", f"{rate:.0f}", of_loop, busy])
    print(table(["images", "CPU-ms of the detecting process", "images/s", "of the loop's", "busy"], rows))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from tests.benchmarks import feeding  # noqa: PLW0406  its functions are pickled by their names, and its engine is one

    feeding.main()
