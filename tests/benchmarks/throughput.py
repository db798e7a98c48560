"""Images per second of every contender over the same images and the same model.

    python -m tests.benchmarks.throughput                                      # small and large images, 3 rounds
    python -m tests.benchmarks.throughput --rounds 1 --only ours --count 64    # while developing

Measured: from the start of the work to the last row written. Not in it: interpreter and library start, loading and warming
the model (both are shown as start-up), and, for the pipeline, writing summary and report. The machine has to be quiet.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from tests.benchmarks import results
from tests.benchmarks.contenders import Contender, own_contenders
from tests.benchmarks.images import BENCH, COUNTS, LARGE, SMALL, link_images, make_images
from tests.benchmarks.model import make_model
from tests.benchmarks.rounds import run_rounds

_TITLES = {SMALL: "JPEGs of about 640x480", LARGE: "JPEGs of 12 megapixels"}


def main() -> None:
    """Runs the rounds and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="contenders whose names contain one of these parts, with commas")
    parser.add_argument("--images", default=f"{SMALL},{LARGE}", help="which images (default: %(default)s)")
    parser.add_argument("--count", type=int, default=0, help="so many images, of which those beyond the usual ones are links")
    args = parser.parse_args()
    make_model()
    wanted = {n: c for n, c in own_contenders().items() if any(part in n for part in args.only.split(","))}
    for kind in args.images.split(","):
        _measure(kind, wanted, args.count, args.rounds)


def _measure(kind: str, contenders: Mapping[str, Contender], most: int, rounds: int) -> None:
    count = most or COUNTS[kind]
    images = make_images(kind)
    if count != COUNTS[kind]:
        images = link_images(images, BENCH / f"{kind}-{count}", count)
    runs = run_rounds(contenders, images, count, rounds, BENCH / "out" / kind)
    print(f"\n### {count} {_TITLES[kind]}\n\n{results.machine()}\n")
    print(results.runs_table(runs, contenders), flush=True)


if __name__ == "__main__":
    main()
