"""How much of a tar file a second run reads, when all of its images have rows.

    python -m tests.benchmarks.second_run [--images 1000]

The images have a megabyte each. Before each run the system drops what it has cached of the tar file; `fincore` then says how many
of its bytes were read, whichever process did.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import cv2
import numpy as np

from tests.benchmarks.images import BENCH
from tests.benchmarks.many_names import NOTES
from tests.benchmarks.results import table

_HW = (600, 600)  # 1.08 MB as BMP


def main() -> None:
    """Runs two jobs, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000)
    images = parser.parse_args().images
    path, output = BENCH / f"second-{images}.tar", BENCH / f"second-{os.getpid()}"
    if not path.exists():
        _make(path, images)
    rows = []
    for name in ("first", "second"):
        _forget(path)
        places = ["--input", str(path), "--output", str(output), "--engine", "tests.benchmarks.many_names:open_model"]
        environment = os.environ | {NOTES: str(BENCH / "notes")}
        done = subprocess.run(
            [sys.executable, "-m", "pipeline.run", *places], check=True, env=environment, capture_output=True, text=True
        )
        said = next(line for line in done.stdout.splitlines() if "images read" in line).partition(";")[0]
        rows.append([name, f"{_cached_bytes(path) / path.stat().st_size:.2%}", said])
    print(table(["run", f"read of {path.stat().st_size / 1e9:.2f} GB", "images"], rows))


def _make(path: Path, images: int) -> None:
    random = np.random.default_rng(0)
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for number in range(images):
            content = cv2.imencode(".bmp", random.integers(0, 255, (*_HW, 3), np.uint8))[1].tobytes()
            member = tarfile.TarInfo(f"{number:06}.bmp")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def _forget(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cached_bytes(path: Path) -> int:
    found = subprocess.run(["fincore", "-nrbo", "RES", str(path)], check=True, capture_output=True, text=True)
    return int(found.stdout)


if __name__ == "__main__":
    main()
