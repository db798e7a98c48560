"""How fast photos of 20 megapixels are detected in tiles, beside as many small images, with an engine that costs nothing.

    python -m tests.benchmarks.tiles [--photos 12] [--rounds 3]

The small images have the size of the tiles, 640x640, which is the model's input. Both are JPEGs of one quality, and take turns.
The CPU time of all processes tells them apart on a busy machine, too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import apache_beam as beam
import numpy as np
import psutil

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, WriteConfig
from pipeline.detect.batcher import Batcher
from pipeline.detect.detect_objects import DetectObjects
from pipeline.detect.loaded_model import LoadedModel
from pipeline.feed.tiles import Tiles, cut_up
from pipeline.listing.read_images import ReadImages
from pipeline.outcome.write_shards import Results, WriteShards
from pipeline.results.completion import RowVersion
from pipeline.results.run_folder import Run
from pipeline.runners.in_memory import InMemoryRunner
from tests.benchmarks.feeding import ENGINE, make_images
from tests.benchmarks.results import machine

WH, SIDE = (5472, 3648), 640


def free_model(_detect: DetectConfig) -> LoadedModel:
    """The model of `feeding`, for tiles."""
    names = tuple(f"class {n}" for n in range(80))
    metadata = DetectorMetadata("free", (SIDE, SIDE), "letterbox", names, box_units="pixels", count_output="")
    return LoadedModel(metadata, "1", Batcher(ENGINE, (SIDE, SIDE)))


def cpu_seconds() -> float:
    """CPU time of this process and of its feeder processes, also of those that have ended."""
    root = psutil.Process()
    return sum(sum(each.cpu_times()[:4]) for each in [root, *root.children()])


def seconds(images: Path, output: Path, tiles: int | None) -> np.ndarray:
    """How long a job takes, and its CPU time."""
    run, began = Run(f"{output}/{time.time_ns()}", "run"), np.array([time.monotonic(), cpu_seconds()])
    with run.opened(), beam.Pipeline(runner=InMemoryRunner()) as pipeline:
        read = pipeline | ReadImages([f"{images}/"], rebalance=False)
        found = read.images | DetectObjects(free_model, DetectConfig(tiles=tiles))
        results = Results(found.detected, (read.dead, found.dead), read.counted)
        _ = results | WriteShards(run, RowVersion("free", "1"), WriteConfig())
    return np.array([time.monotonic(), cpu_seconds()]) - began


def main() -> None:
    """Prints the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    tiles = args.photos * len(cut_up(WH, Tiles(SIDE, SIDE // 5)))
    with tempfile.TemporaryDirectory() as temporary:
        photos, small, one, output = (Path(temporary, name) for name in ("photos", "small", "one", "out"))
        for folder, wh, count in ((photos, WH, args.photos), (small, (SIDE, SIDE), tiles), (one, (SIDE, SIDE), 1)):
            make_images(folder, wh, count)
        kinds = {"tiles": (photos, SIDE), "small images": (small, None)}
        starts = {name: seconds(one, output, of_tiles) for name, (_, of_tiles) in kinds.items() for _ in range(2)}  # the second
        print(machine(), f"; {tiles} of each", sep="")
        ratios = []
        for _ in range(args.rounds):
            took = {name: seconds(images, output, of_tiles) - starts[name] for name, (images, of_tiles) in kinds.items()}
            for name, (wall_s, cpu_s) in took.items():
                print(f"{name}: {tiles / wall_s:.0f} a second, {1e3 * cpu_s / tiles:.2f} CPU-ms", flush=True)
            ratios.append(took["tiles"] / took["small images"])
        wall, cpu = np.median(ratios, axis=0)
        print(f"tiles take {wall:.2f} of the time and {cpu:.2f} of the CPU time of small images, medians")


if __name__ == "__main__":
    main()
