"""CPU time of an image by library: the plain loop, the pipeline's detector without Beam, and the whole pipeline.

    python -m tests.benchmarks.cpu_profile [--images images] [--precision bfloat16]

Linux's `perf` (Debian's package linux-perf) looks 500 times a second which code each core runs; a container may need leave to use
it. What runs before and after the work is left out. oneDNN makes the code of convolutions at run time. What a convolution takes
depends on what the other cores do meanwhile: two virtual cores may share one core's units and caches.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from tests.benchmarks import results
from tests.benchmarks.contenders import Contender, detector_alone, own_contenders
from tests.benchmarks.images import BENCH, COUNTS, SMALL, make_images
from tests.benchmarks.model import make_model
from tests.benchmarks.rounds import Run, output_of, run_once

_HZ = 500
_PARTS = {
    "convolutions (oneDNN)": ("JIT", "perf-", "anon"),
    "rest of TensorFlow": ("libtensorflow", "pywrap"),
    "OpenCV": ("cv2",),
    "Python": ("libpython", "python3"),
    "C library": ("libc.so", "libc-"),
    "Linux": ("kernel",),
}


def main() -> None:
    """Profiles each and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", choices=list(COUNTS), default=SMALL)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    args = parser.parse_args()
    if not shutil.which("perf"):
        raise SystemExit("perf is not installed; Debian has it in the package linux-perf")
    make_model()
    images = make_images(args.images)
    own = own_contenders()
    wanted = {
        "plain loop": own[f"plain loop, {args.precision}"],
        "detector without Beam": detector_alone(args.precision),
        "pipeline": own[f"ours, {args.precision}"],
    }
    found = {name: _profile(name, contender, images) for name, contender in wanted.items()}
    header = ["CPU-ms an image", *wanted]
    parts = [[part, *(f"{ms[part]:.1f}" for ms, _ in found.values())] for part in [*_PARTS, "other"]]
    sums = ["all", *(f"{ms.total():.1f}" for ms, _ in found.values())]
    rates = ["images/s", *(f"{run.images_per_second:.1f}" for _, run in found.values())]
    print(f"{args.images}, {args.precision}; {results.machine()}\n\n{results.table(header, [*parts, sums, rates])}")


def _profile(name: str, contender: Contender, images: Path) -> tuple[Counter[str], Run]:
    output, data = BENCH / "out" / "profile", BENCH / "out" / "perf.data"
    perf = ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(_HZ), "-k", "CLOCK_REALTIME", "-o", str(data), "--"]
    sampled = dataclasses.replace(contender, command=lambda images, output: [*perf, *contender.command(images, output)])
    data.parent.mkdir(parents=True, exist_ok=True)
    run = run_once(name, sampled, 0, images, output_of(output, name))
    fields = ["perf", "script", "-i", str(data), "-F", "time,ip,dso"]
    lines = subprocess.run(fields, capture_output=True, text=True, check=True).stdout.splitlines()
    samples: Counter[str] = Counter()
    for line in lines:
        at, _, place = line.partition(":")
        if run.started_at <= float(at) <= run.started_at + run.work_seconds:
            samples[_part(place.rpartition("(")[2])] += 1
    return Counter({part: count * 1000 / _HZ / run.images for part, count in samples.items()}), run


def _part(library: str) -> str:
    name = library.rstrip(")").rpartition("/")[2]
    return next((part for part, names in _PARTS.items() if any(each in name for each in names)), "other")


if __name__ == "__main__":
    main()
