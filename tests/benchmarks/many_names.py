"""Whole jobs over ever more names: when the first image is detected, and how much memory the job takes.

    python -m tests.benchmarks.many_names [--sizes 10000,1000000]            a local disk, folders of 1,000 images
    python -m tests.benchmarks.many_names --storage --sizes 10000,100000     one flat folder of a server with the protocol of S3

The images are links to 64 small JPEGs, and the engine finds nothing in no time, so that names are most of the work. `first image`
is the time from the end of the engine's warm-up to its first batch of images; the listing goes on meanwhile. The peak is that of
the job's processes together.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import cv2
import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.engine import FunctionEngine, OpenedModel
from tests.benchmarks.images import BENCH
from tests.benchmarks.process_tree import watch
from tests.benchmarks.results import table
from tests.emulators import S3_KEY, running_s3_server

HW = (32, 32)
_PER_FOLDER = 1000
_DIFFERENT = 64
_DARKEST = 50  # the images are lighter, and those of a warm-up are not
_TIMEOUT_S = 3600
NOTES = "MANY_NAMES_NOTES"  # names the file of the engine's times


def main() -> None:
    """Runs a job of each size, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10000,1000000")
    parser.add_argument("--storage", action="store_true")
    args = parser.parse_args()
    rows = []
    for size in map(int, args.sizes.split(",")):
        folder = _make(size, size if args.storage else _PER_FOLDER)
        with _served(folder) if args.storage else nullcontext(str(folder)) as images:
            rows.append([f"{size:,}", *_measure(images, size)])
    print(table(["images", "first image, s", "peak MB", "images/s", "detected"], rows))


def open_model(_local: str, _path: str, _model: ModelConfig, detect: DetectConfig) -> OpenedModel:
    """The engine; it notes the end of its warm-up, and its first batch of images."""
    notes, seen = Path(os.environ[NOTES]), [False]

    def run(pixels: np.ndarray) -> dict[str, np.ndarray]:
        if not seen[0]:
            seen[0] = bool(pixels.min() > _DARKEST)
            with notes.open("a") as file:
                file.write(f"{time.time()} {seen[0]}\n")
        return {"boxes": np.zeros((len(pixels), 1, 4), np.float32), "scores": np.zeros((len(pixels), 1), np.float32)}

    return OpenedModel(FunctionEngine(run, detect), DetectorMetadata("none", HW, "stretch", ("none",), box_units="pixels"))


def _measure(images: str, size: int) -> list[str]:
    output, notes = BENCH / f"out-{time.time_ns()}", BENCH / f"notes-{time.time_ns()}"
    places = ["--input", images, "--output", str(output.resolve()), "--engine", "tests.benchmarks.many_names:open_model"]
    environment = {NOTES: str(notes.resolve())}
    watched = watch([sys.executable, "-m", "pipeline.run", *places], BENCH / "log", _TIMEOUT_S, environment, lambda: False)
    if watched.exit_code:
        raise SystemExit(watched.output[-3000:])
    lines = [line.split() for line in notes.read_text().splitlines()]
    warm = max(float(at) for at, is_image in lines if is_image == "False")
    first = min(float(at) for at, is_image in lines if is_image == "True")
    counted = subprocess.run(
        [sys.executable, "-m", "pipeline", "rows", str(output)], check=True, capture_output=True, text=True
    ).stdout.count("\n")
    seconds = watched.samples[-1][0] - first
    return [f"{first - warm:.1f}", f"{watched.peak_rss_mb:.0f}", f"{size / seconds:.0f}", f"{counted:,}"]


def _make(size: int, per_folder: int) -> Path:
    """A folder of links to a few JPEGs, in folders of so many; made where it is not there yet."""
    images = (BENCH / f"names-{size}-{per_folder}" / "bucket").resolve()
    if images.with_suffix(".made").exists():
        return images
    random = np.random.default_rng(0)
    first: list[Path] = []
    for number in range(size):
        path = images / f"{number // per_folder:05d}" / f"IMG_{number:08d}.jpg"
        if number % per_folder == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
        if number < _DIFFERENT:
            cv2.imwrite(str(path), random.integers(150, 255, (*HW, 3), np.uint8))
            first.append(path)
        else:
            path.hardlink_to(first[number % _DIFFERENT])
    images.with_suffix(".made").touch()
    return images


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """A folder as a bucket; the environment names the server."""
    with running_s3_server(folder.parent) as url:
        os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": S3_KEY, "AWS_SECRET_ACCESS_KEY": S3_KEY}
        os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
        yield f"s3://{folder.name}/"


if __name__ == "__main__":
    main()
