"""Whole jobs over ever more names: when the first image is detected, and how much memory the job takes.

    python -m tests.benchmarks.many_names [--sizes 10000,1000000]            a local disk, folders of 1,000 images
    python -m tests.benchmarks.many_names --storage --sizes 10000,100000     a bucket of Cloud Storage without folders

The images are 64 small JPEGs under many names, and the engine finds nothing in no time, so that names are most of the work.
`first image` is the time from the end of the engine's warm-up to its first batch of images; the listing goes on meanwhile. The
peak is that of the job's processes together.

The bucket is served by this process, which answers a listing after 50 ms. Emulators take time with the square of the number of
objects: fake-gcs-server looks for each object that is read in a list of all, and versitygw reads the whole folder for each page.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import cv2
import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.engine import FunctionEngine, OpenedModel
from tests.benchmarks.images import BENCH, link_images
from tests.benchmarks.process_tree import watch
from tests.benchmarks.results import table
from tests.processes import served

HW = (32, 32)
_PER_FOLDER = _PER_PAGE = 1000
_DIFFERENT = 64
_DARKEST = 50  # the images are lighter, and those of a warm-up are not
_LISTING_SECONDS = 0.05
_TIMEOUT_S = 3600
_SAMPLE_SECONDS = 0.1  # the report of a small folder takes a few of them
NOTES = "MANY_NAMES_NOTES"  # names the file of the engine's times


def main() -> None:
    """Runs a job of each size, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10000,1000000")
    parser.add_argument("--storage", action="store_true")
    args = parser.parse_args()
    rows = []
    for size in map(int, args.sizes.split(",")):
        with _bucket(size) if args.storage else nullcontext(_folder(size)) as images:
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
    watched = watch(
        [sys.executable, "-m", "pipeline.run", *places], BENCH / "log", _TIMEOUT_S, environment, lambda: False, _SAMPLE_SECONDS
    )
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


def _jpegs() -> Path:
    """The folder of a few JPEGs."""
    folder, random = BENCH / "names", np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(_DIFFERENT):
        cv2.imwrite(f"{folder}/{number:02}.jpg", random.integers(150, 255, (*HW, 3), np.uint8))
    return folder


def _folder(size: int) -> str:
    return str(link_images(_jpegs(), BENCH / f"names-{size}", size, _PER_FOLDER).resolve())


@contextmanager
def _bucket(size: int) -> Iterator[str]:
    """A bucket of so many objects; the environment names its server."""
    contents = [path.read_bytes() for path in sorted(_jpegs().iterdir())]
    server = _Server([f"IMG_{number:08}.jpg" for number in range(size)], contents)
    with served(server) as port:
        os.environ["STORAGE_EMULATOR_HOST"] = f"http://127.0.0.1:{port}"
        yield "gs://bench/"


class _Server(ThreadingHTTPServer):
    """Cloud Storage with one bucket; the objects share a few contents."""

    daemon_threads = True

    def __init__(self, names: Sequence[str], contents: Sequence[bytes]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self._names, self._contents = names, contents

    def listing(self, asked: dict[str, str]) -> bytes:
        """A page of the names in a range."""
        names = self._names
        start = bisect_left(names, asked.get("pageToken") or asked.get("startOffset", ""))
        end = bisect_left(names, asked["endOffset"]) if "endOffset" in asked else len(names)
        stop = min(end, start + int(asked.get("maxResults", _PER_PAGE)))
        items = [
            {"bucket": "bench", "name": name, "size": len(self.content(name)), "generation": "1"} for name in names[start:stop]
        ]
        return json.dumps({"items": items} | ({"nextPageToken": names[stop]} if stop < end else {})).encode()

    def content(self, name: str) -> bytes:
        """The content of an object."""
        return self._contents[int(name[4:-4]) % len(self._contents)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet an answer
    server: _Server

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        if place.path.endswith("/o"):
            time.sleep(_LISTING_SECONDS)
            content = self.server.listing(dict(parse_qsl(place.query)))
        else:
            content = self.server.content(place.path.rpartition("/")[2])
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.send_header("x-goog-generation", "1")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    main()
