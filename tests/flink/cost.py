"""Holds what `pipeline.cost` says of a job against what one takes on a Flink cluster of this machine.

    .venv/bin/python -m tests.flink.cost --images 10000

A tenth of the images are done first, so that what a job takes once stays apart from what each image takes. Images and results are
on a storage emulator that counts operations, in this process; bytes are those of the objects, and what Flink says that its
shuffles have moved; processor time is that of the workers, with the benchmarks' detector, and is held against what an image takes
on this processor in memory. Exit code 1 where a figure is further off than docs/COST.md says.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.cost import Measured, Work, estimate
from tests.benchmarks.contenders import ours
from tests.benchmarks.cost import counting_storage
from tests.benchmarks.images import BENCH, SMALL, link_images, make_images
from tests.benchmarks.model import make_model
from tests.conftest import REPO
from tests.flink.cluster import TASKMANAGERS, FlinkCluster, FlinkMissing, running_flink
from tests.flink.usage import WORKERS, ProcessorTime, on_flink, run_measured, shuffled

_TIMEOUT_SECONDS = 1800
_CREDENTIALS = "GOOGLE_APPLICATION_CREDENTIALS"
# by how much a prediction may be off, as a factor
_OFF = {"class_a": 2.0, "class_b": 1.1, "read_gb": 1.001, "results_gb": 4 / 3, "shuffle_gb": 2.0, "cpu_hours": 1.33}
_OF_MORE_IMAGES = ("cpu_hours",)  # the start of workers is time of machines, which has a price of its own


@dataclasses.dataclass(frozen=True)
class Job:
    """A job that was run.

    Attributes:
      work: It as `pipeline.cost` is told of it.
      counted: What it took, by the name of the prediction.
    """

    work: Work
    counted: Mapping[str, float]


def main() -> int:
    """Runs the jobs and prints predicted beside counted; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    images = parser.parse_args().images
    measured = dataclasses.replace(Measured(), cpu_ms=_cpu_ms())
    print(f"an image takes {measured.cpu_ms:.1f} ms of this processor in memory", flush=True)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            running_flink(Path(folder)) as flink,
            counting_storage() as (bucket, counts),
        ):
            os.environ[_CREDENTIALS] = _credentials(Path(folder))
            few, many = (_run(flink, bucket, counts, size) for size in (images // 10, images))
    except FlinkMissing as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    return _compare(few, many, measured)


def _cpu_ms(count: int = 512) -> float:
    """Processor time of an image where all is in one process."""
    images = link_images(make_images(SMALL), BENCH / f"links-{count}", count)
    make_model()
    with tempfile.TemporaryDirectory() as output:
        _, cpu_ms = run_measured(ours().command(images, Path(output)), Path(output))
    return sum(cpu_ms.values())


def _run(flink: FlinkCluster, bucket: Any, operations: Counter[str], images: int) -> Job:
    """Runs a job over so many images of its own."""
    source, output = f"in{images}", f"out{images}"
    image_kb = _upload(bucket, source, images)
    operations.clear()
    storage = {name: os.environ[name] for name in ("STORAGE_EMULATOR_HOST", _CREDENTIALS)}
    command = [sys.executable, "-m", "pipeline.run", "--config", "tests/benchmarks/ours.yaml", "--read-threads=32"]
    command += ["--model", str(make_model().resolve()), *on_flink(flink, **storage)]
    places = ["--input", f"gs://{bucket.name}/{source}/*", "--output", f"gs://{bucket.name}/{output}"]
    with ProcessorTime() as spent:
        subprocess.run([*command, *places], cwd=REPO, check=True, timeout=_TIMEOUT_SECONDS)
    counted = {**operations, **_gigabytes(bucket, read_gb=source, results_gb=f"{output}/detections")}
    steps = list(shuffled(flink, flink.jobs("FINISHED")[-1]))
    counted["shuffle_gb"] = sum(step.received_bytes for step in steps if step.is_of_images) / 1e9
    told_mb = sum(step.received_bytes for step in steps if not step.is_of_images) / 1e6
    counted["cpu_hours"] = spent.seconds()[WORKERS] / 3600
    summary = json.loads(bucket.blob(f"{output}/summary.json").download_as_bytes())
    work = Work(
        images,
        objects=summary["detections"] / images,
        image_kb=image_kb,
        machines=TASKMANAGERS,
        images_per_second=summary["images_per_second"] / TASKMANAGERS,
        startup_minutes=summary["submission_seconds"] / 60,
        ramp_minutes=0.0,  # both are there from the beginning
        bundle_images=images / TASKMANAGERS,
    )
    seconds = {kind: round(value, 1) for kind, value in spent.seconds().items()}
    said = f"{images} images, {summary['images_per_second']:.1f} images/s, {told_mb:.1f} MB of counts and thumbnails"
    print(f"{said}; processor seconds: {seconds}", flush=True)
    return Job(work, counted)


def _credentials(folder: Path) -> str:
    """A file of credentials that nobody checks; without any, each process looks for some for half a minute."""
    path = folder / "credentials.json"
    never = {"type": "authorized_user", "token": "-", "expiry": "2100-01-01T00:00:00"}
    path.write_text(json.dumps({**never, "client_id": "-", "client_secret": "-", "refresh_token": "-"}))
    return str(path)


def _upload(bucket: Any, folder: str, images: int) -> float:
    """Puts images into a folder of a bucket; returns their mean size in kB."""
    paths = list(itertools.islice(itertools.cycle(sorted(make_images(SMALL).glob("*.jpg"))), images))
    with ThreadPoolExecutor(4) as pool:
        names = (f"{folder}/{number:06d}.jpg" for number in range(images))
        list(pool.map(lambda name, path: bucket.blob(name).upload_from_filename(str(path)), names, paths))
    return sum(path.stat().st_size for path in paths) / images / 1e3


def _gigabytes(bucket: Any, **folders: str) -> dict[str, float]:
    """Bytes of the objects in each folder, by the given name."""
    return {name: sum(blob.size for blob in bucket.list_blobs(prefix=f"{folder}/")) / 1e9 for name, folder in folders.items()}


def _predicted(work: Work, measured: Measured) -> dict[str, float]:
    return {**vars(estimate(work, measured)), "cpu_hours": work.images * measured.cpu_ms / 3.6e6}


def _compare(few: Job, many: Job, measured: Measured) -> int:
    said, at_first, code = _predicted(many.work, measured), _predicted(few.work, measured), 0
    print(f"{'':>12} {'predicted':>12} {'counted':>12} {'counted/predicted':>18} {'the same of more images':>24}")
    for name, most in _OFF.items():
        value, more = many.counted[name], many.counted[name] - few.counted[name]
        by_image = more / (said[name] - at_first[name])
        within = 1 / most <= (by_image if name in _OF_MORE_IMAGES else value / said[name]) <= most
        code = code if within else 1
        remark = "" if within else f"  further off than {most:.2f}"
        print(f"{name:>12} {said[name]:>12.6g} {value:>12.6g} {value / said[name]:>18.3f} {by_image:>24.3f}{remark}")
    return code


if __name__ == "__main__":
    sys.exit(main())
