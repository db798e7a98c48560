"""Memory and rate of the pipeline at 1,000 and at 20,000 images.

    python -m tests.benchmarks.memory [--rounds 2] [--sizes 1000,20000] [--precision float32]

The many images are the 512 small ones, as hard links under many names in nested folders: for the pipeline each is an image of
its own (it knows them by their names), but the disk's cache serves them. The model is the full-sized one, so that the fixed
second in which Beam builds its graph does not hide in the rate of 1,000 images. Memory is the process tree's, every 0.5 s.
"""

from __future__ import annotations

import argparse

from tests.benchmarks import results
from tests.benchmarks.contenders import ours
from tests.benchmarks.images import BENCH, SMALL, link_images, make_images
from tests.benchmarks.model import make_model
from tests.benchmarks.rounds import run_rounds

_PER_FOLDER = 500


def main() -> None:
    """Runs the sizes alternately and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sizes", default="1000,20000")
    default = "bfloat16" if "bf16" in results.machine() else "float32"
    parser.add_argument("--precision", default=default, help="bfloat16 where the CPU has it, in half the time")
    args = parser.parse_args()
    make_model()
    sizes = list(map(int, args.sizes.split(",")))
    names = [f"{size} images" for size in sizes]
    contender, runs = ours("--precision", args.precision)._replace(against=names[0]), []
    for number in range(args.rounds):
        for name, size in zip(names, sizes, strict=True):
            images = link_images(make_images(SMALL), BENCH / f"many-{size}", size, _PER_FOLDER)
            (run,) = run_rounds({name: contender}, images, size, 1, BENCH / "out" / "many")
            runs.append(run._replace(round=number))
    print(f"\n### Many images, {args.precision}\n\n{results.machine()}\n")
    print(results.runs_table(runs, dict.fromkeys(names, contender), beside=names[0]), flush=True)


if __name__ == "__main__":
    main()
