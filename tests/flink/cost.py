"""Holds what `pipeline.cost` says of a job against what one takes on a Flink cluster of this machine.

    .venv/bin/python -m tests.flink.cost --images 10000

Images and results are on a storage emulator that counts operations, here in this process; bytes are those of the objects, and
what Flink says that its machines sent each other. Exit code 1 where a figure is further off than it is known to be.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.cost import Usage, Work, estimate
from tests.benchmarks.cost import SAMPLES, counting_storage
from tests.conftest import REPO
from tests.flink.cluster import FlinkCluster, FlinkMissing, job_flags, running_flink

# by how much a prediction may be off, as a factor: docs/COST.md says what each is made of
_OFF = {"class_a": 3.0, "class_b": 4 / 3, "read_gb": 1.01, "results_gb": 4 / 3}


def main() -> int:
    """Runs the job and prints predicted beside counted; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    images = parser.parse_args().images
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            running_flink(Path(folder)) as flink,
            counting_storage() as (bucket, counts),
        ):
            _upload(bucket, images)
            counts.clear()
            _run_job(flink, bucket.name)
            counted = {**counts, **_bytes(bucket), "shuffle_gb": _sent_bytes(flink) / 1e9}
            summary = json.loads(bucket.blob("out/summary.json").download_as_bytes())
    except FlinkMissing as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    predicted = estimate(Work(images, objects=summary["detections"] / images, image_kb=_mean_kb(images)))
    return _compare(predicted, counted)


def _named(images: int) -> list[tuple[str, Path]]:
    return [(f"in/{n:06d}.jpg", path) for n, path in zip(range(images), itertools.cycle(SAMPLES), strict=False)]


def _mean_kb(images: int) -> float:
    return sum(path.stat().st_size for _, path in _named(images)) / images / 1e3


def _upload(bucket: Any, images: int) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda each: bucket.blob(each[0]).upload_from_filename(str(each[1])), _named(images)))


def _run_job(flink: FlinkCluster, bucket: str) -> None:
    storage = {"STORAGE_EMULATOR_HOST": os.environ["STORAGE_EMULATOR_HOST"]}
    command = [sys.executable, "-m", "pipeline.run", "--config", "configs/batch_gcs_flink.yaml", *job_flags(flink, **storage)]
    places = ["--input", f"gs://{bucket}/in/*", "--output", f"gs://{bucket}/out"]
    subprocess.run([*command, *places], cwd=REPO, check=True, timeout=560)


def _bytes(bucket: Any) -> dict[str, float]:
    sizes = {blob.name: blob.size for blob in bucket.list_blobs()}
    return {
        f"{name}_gb": sum(size for path, size in sizes.items() if path.startswith(folder)) / 1e9
        for name, folder in (("read", "in/"), ("results", "out/detections/"))
    }


def _sent_bytes(flink: FlinkCluster) -> int:
    """What the job's machines sent each other, the machine that they are on included; also where nothing is grouped."""
    (job,) = flink.jobs("FINISHED")
    return sum(vertex["metrics"]["write-bytes"] for vertex in flink.ask(f"/jobs/{job}")["vertices"])


def _compare(predicted: Usage, counted: dict[str, float]) -> int:
    print(f"{'':>12} {'predicted':>12} {'counted':>12} {'counted/predicted':>18}")
    code = 0
    for name, value in counted.items():
        said = getattr(predicted, name)
        within = 1 / _OFF[name] <= value / said <= _OFF[name] if name in _OFF else True
        code = code if within else 1
        print(f"{name:>12} {said:>12.6g} {value:>12.6g} {value / said:>18.3f}{'' if within else '  further off than said'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
