"""Measures what an image costs beside its share of the model: the constants of `detect-objects cost`, from runs on this machine.

    .venv/bin/python -m tests.benchmarks.cost

Operations are counted by a storage emulator, request by request, as the difference of a larger and a smaller run, so that what a
job costs once stays apart.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import re
import sys
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from pipeline import run
from pipeline.config import BUNDLED, ModelConfig
from pipeline.records import DetectedImage, Detections, ImageRef, compact_bytes, detection_row
from pipeline.results.completion import RowVersion
from pipeline.results.layout import DETECTIONS
from pipeline.results.reader import done_keys, list_shards
from pipeline.results.rows import detections_table
from pipeline.results.run_folder import Run
from pipeline.results.shards import add_rows, parquet_bytes
from pipeline.stream.outgoing import detection_message
from tests.conftest import REPO
from tests.emulator_fixtures import new_bucket

SAMPLES = sorted((REPO / "models" / "digits" / "samples").glob("*.jpg"))
# https://cloud.google.com/storage/pricing#operations-by-class; what an upload sends in parts is one operation, deleting is free
_COUNTED = (
    ("class_a", re.compile(r"GET /storage/v1/b/[^/]+/o|POST /upload/.*|POST .*/(rewriteTo|copyTo|compose)/?.*|POST /batch/.*")),
    ("class_b", re.compile(r"GET /storage/v1/b/[^/]+(/o/.+)?|GET /download/.*")),
    ("of_images", re.compile(r"GET .*/o/in\d+%2F.+")),
)
_CONTENT = re.compile(r"/download/storage/v1/b/([^/]+)/o/(.+)")
_ROWS = 1000  # of a shard
_VERSION = RowVersion("digits", "1", "5e771265", "5e771266")


@contextlib.contextmanager
def counting_storage() -> Iterator[tuple[Any, collections.Counter[str]]]:
    """A storage emulator in this process: a new bucket, and its operations by class. The environment names it for this while."""
    from gcp_storage_emulator import server

    counts: collections.Counter[str] = collections.Counter()

    class Counting(server.RequestHandler):
        def end_headers(self) -> None:
            """Also sends the generation of the object, as Cloud Storage does and this emulator does not."""
            path = urllib.parse.urlparse(self.path).path
            counts.update(name for name, known in _COUNTED if known.fullmatch(f"{self.command} {path}"))
            if found := _CONTENT.fullmatch(path):
                with contextlib.suppress(Exception):  # there is no such object
                    stored = self.storage.get_file_obj(*map(urllib.parse.unquote, found.groups()))
                    self.send_header("X-Goog-Generation", stored["generation"])
            super().end_headers()

    running = server.create_server("127.0.0.1", 0, in_memory=True)
    running._storage._write_config_to_file = lambda: None  # all names, at each write: of ten thousand that takes a second
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "RequestHandler", Counting)
        running.start()
        try:
            running._api.is_running.wait(30)
            yield new_bucket(f"http://127.0.0.1:{running._api._httpd.server_port}", patch), counts
        finally:
            running.stop()


def storage_operations(sizes: tuple[int, int]) -> dict[str, float]:
    """Operations of each class an image, from runs of two sizes over images in a bucket.

    Reading operations of an image are those on the image itself. A shard counts by itself. Both runs have more images than the
    report shows, which reads those a second time.
    """
    seen: list[collections.Counter[str]] = []
    with counting_storage() as (bucket, counts):
        of_shards = shard_operations(f"gs://{bucket.name}/shards", counts)
        for size in sizes:
            for number in range(size):
                bucket.blob(f"in{size}/{number}.jpg").upload_from_filename(str(SAMPLES[number % len(SAMPLES)]))
            counts.clear()
            output = f"gs://{bucket.name}/out{size}"
            with contextlib.redirect_stdout(sys.stderr):
                code = run.main(["--input", f"gs://{bucket.name}/in{size}/*", "--output", output, "--model", "digits"])
            if code:
                raise RuntimeError(f"the job ended with {code}")
            seen.append(counts.copy())
            seen[-1]["class_a"] -= len(list_shards(output)) * int(of_shards["class_a_a_shard"])
    a, b = ((seen[1][name] - seen[0][name]) / (sizes[1] - sizes[0]) for name in ("class_a", "of_images"))
    return {**of_shards, "class_a_an_image": a, "class_b_an_image": b}


def shard_operations(folder: str, counts: collections.Counter[str]) -> dict[str, float]:
    """Operations of writing a shard, and of reading the keys in it."""
    found = detections_table(of_samples(), _VERSION, "run", 0.0)
    counts.clear()
    add_rows(Run(folder, "run"), DETECTIONS, found)
    written = counts["class_a"]
    counts.clear()
    done_keys(folder, _VERSION, DETECTIONS)
    return {"class_a_a_shard": float(written), "class_b_of_keys": float(counts["class_b"])}


def shard_bytes() -> dict[str, float]:
    """Bytes of a row without objects, and of each object in it, in a Parquet shard."""
    rng, sizes = np.random.default_rng(0), []
    for objects in (0, 10):
        images = []
        for number in range(_ROWS):
            ref = ImageRef(f"gs://bucket/images/2026/11/21/{number:09d}.jpg", str(1795219200000000 + number * 977))
            boxes, names = rng.uniform(0, 1000, (objects, 4)).astype(np.float32), ("person", "car") * (objects // 2)
            classes, confidences = rng.integers(0, 2, objects, np.int32), rng.uniform(0, 1, objects).astype(np.float32)
            images.append(DetectedImage(ref, 1920, 1080, "digits", "1", Detections(boxes, classes, confidences, names)))
        sizes.append(len(parquet_bytes(detections_table(images, _VERSION, "run", 0.0))) / _ROWS)
    return {"shard_row_bytes": sizes[0], "shard_object_bytes": (sizes[1] - sizes[0]) / 10}


def of_samples() -> list[DetectedImage]:
    """The sample scenes as the bundled detector sees them."""
    from pipeline.detect.load_detector import DetectorSpec, shared_detector
    from pipeline.records import EncodedImage

    refs = [ImageRef(f"gs://bucket/images/2026/11/21/{path.name}", "1795219200000000") for path in SAMPLES]
    images = [EncodedImage(ref, path.read_bytes()) for ref, path in zip(refs, SAMPLES, strict=True)]
    found = shared_detector(DetectorSpec(ModelConfig(BUNDLED))).detect(images)
    return [each for each in found if isinstance(each, DetectedImage)]


def row_and_message_bytes(images: Sequence[DetectedImage]) -> dict[str, float]:
    """Bytes of a row without objects, of each object in it, and of what a message holds beside its row."""
    objects = np.array([len(image.detections) for image in images])
    rows = np.array([len(compact_bytes(detection_row(image))) for image in images])
    (an_object, a_row), *_ = np.linalg.lstsq(np.stack([objects, np.ones(len(rows))], 1), rows, rcond=None)
    messages = [detection_message(image, time.time()) for image in images]
    beside = [sum(len(name) + len(str(value)) for name, value in message.attributes.items()) for message in messages]
    return {"row_bytes": a_row, "object_bytes": an_object, "attribute_bytes": float(np.mean(beside))}


def main() -> None:
    """Prints the constants as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--storage", type=int, nargs=2, default=(20, 52), metavar=("A", "B"), help="images of each run")
    found = {**row_and_message_bytes(of_samples()), **shard_bytes(), **storage_operations(parser.parse_args().storage)}
    print(json.dumps({name: round(value, 3) for name, value in found.items()}, indent=2))


if __name__ == "__main__":
    main()
