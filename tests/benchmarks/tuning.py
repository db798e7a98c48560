"""What `tune` measures, beside a job with the same settings, in turns.

    python -m tests.benchmarks.tuning                                # 512 images of about 640x480, 3 rounds
    python -m tests.benchmarks.tuning --flags precision=bfloat16     # other settings of the detector

A ratio is the rate of a turn of `tune`, which writes no rows, divided by those of the jobs before and after it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

from pipeline.detect.trial import trial
from tests.benchmarks import results
from tests.benchmarks.contenders import CONFIG, ours
from tests.benchmarks.images import BENCH, COUNTS, SMALL, link_images, make_images
from tests.benchmarks.model import make_model
from tests.benchmarks.rounds import run_once

_PHOTOS = 64  # as many as `tune` takes


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=COUNTS[SMALL], help="images of a job (default: %(default)s)")
    parser.add_argument("--flags", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the detector")
    args = parser.parse_args()
    model, settings = make_model().resolve(), dict(flag.split("=", 1) for flag in args.flags)
    images = make_images(SMALL)
    if args.count != COUNTS[SMALL]:
        images = link_images(images, BENCH / f"{SMALL}-{args.count}", args.count)
    photos = [str(path.resolve()) for path in sorted(images.iterdir())[:_PHOTOS]]
    flags = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", value)]
    given = {"model.path": str(model), **{f"detect.{key}": value for key, value in settings.items()}}

    def job(number: int) -> float:
        return run_once("job", ours(*flags), number, images, BENCH / "out" / "tuning").images_per_second

    with trial([CONFIG], given, photos, 600.0) as answer:
        answer()
        jobs, turns = [job(0)], list[float]()
        for number in range(1, args.rounds + 1):
            turns.append(answer(args.count / jobs[-1]))  # as long as a job
            jobs.append(job(number))
    beside = [*itertools.pairwise(jobs)]
    ratios = [2 * turn / sum(two) for turn, two in zip(turns, beside, strict=True)]
    rows = [
        [f"{turn:.1f}", ", ".join(f"{rate:.1f}" for rate in two), f"{ratio:.2f}"]
        for turn, two, ratio in zip(turns, beside, ratios, strict=True)
    ]
    print(f"\n{results.machine()}\n\n{results.table(['tune, images/s', 'jobs before and after', 'ratio'], rows)}")
    print(f"\nratio {statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})")


if __name__ == "__main__":
    main()
