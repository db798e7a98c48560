"""Other people's ways to do the work, beside the pipeline: one table, one run, one network, the same images.

    python -m tests.benchmarks.peers --hostile ../shared/fixtures/hostile        # make bench-peers
    python -m tests.benchmarks.peers --rounds 1 --count 16 --only ours,Daft      # while developing

First each contender does the hostile images with good ones among them, once as it is and once with its own means against bad
images, if it has any. Then all of them do the same good images in alternated rounds, until the rounds or the minutes are over.
A contender that fails is named below the table, and the others go on. Nothing is repeated where other processes used the
machine: such runs are left out of a contender's medians, unless it has no others, which is marked with a star.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.benchmarks import hostile, results
from tests.benchmarks.contenders import REFERENCE, Contender, peer_contenders, skipping_contenders
from tests.benchmarks.environments import make_environments, python_of
from tests.benchmarks.images import BENCH, SMALL, link_images, make_images
from tests.benchmarks.model import make_model, make_onnx
from tests.benchmarks.rounds import Run, RunFailed, output_of, run_contender, run_once, show

_OUTPUT = BENCH / "out" / "peers"
_COUNT, _GOOD_NEIGHBOURS = 512, 16
_RUN_SECONDS, _HOSTILE_SECONDS = 180.0, 120.0  # what takes longer is ended, with all its processes
_NO_MEANS, _OURS_ALWAYS = "has none", "always on"
# looked for in November 2026
_NOT_HAD = {
    "Ultralytics' `predict(stream=True)`": "needs torch, whose wheels for Linux on x86 bring CUDA "
    "(3.2 GB to fetch, 6.0 GB on disk), and fetches its weights from the web",
    "TensorFlow Serving": "PyPI has its messages (tensorflow-serving-api), neither PyPI nor Debian the server",
    "OpenVINO Model Server": "neither PyPI nor Debian has it",
    "Triton without PyTriton": "PyPI's tritonserver has no release for this platform; PyTriton brings the same server",
}


def main() -> None:
    """Makes what is missing, runs both passes, prints the table."""
    args = _parser().parse_args()
    missing = make_environments()
    print(f"environments, network and images are there: {time.strftime('%H:%M:%S')}", file=sys.stderr, flush=True)
    deadline = time.monotonic() + args.minutes * 60
    images = link_images(make_images(SMALL), BENCH / f"{SMALL}-{args.count}", args.count)
    make_model()
    if "onnxruntime" not in missing:
        make_onnx(python_of("onnxruntime"))
    contenders = {name: each for name, each in peer_contenders().items() if _chosen(name, each, args.only, missing)}
    losses, with_means = _hostile_pass(contenders, args.hostile)
    runs, failed = _rounds(contenders, images, args.count, args.rounds, deadline)
    print(_report(contenders, runs, losses, with_means, failed | missing, args), flush=True)
    if args.only or args.count != _COUNT:
        return  # a look while developing: not to be mistaken for the full figures
    figures = {"runs": [dataclasses.asdict(run) for run in runs], "losses": {name: str(each) for name, each in losses.items()}}
    results.keep("peers", figures | {"losses with means": {name: str(each) for name, each in with_means.items()}})


def _chosen(name: str, contender: Contender, only: str, missing: Mapping[str, str]) -> bool:
    python = contender.command(Path(), Path())[0]
    return python not in map(python_of, missing) and (not only or any(part in name for part in [*only.split(","), REFERENCE]))


def _hostile_pass(
    contenders: Mapping[str, Contender], folder: Path | None
) -> tuple[dict[str, hostile.Losses], dict[str, hostile.Losses]]:
    if not folder or not folder.is_dir():
        print(f"no hostile images ({folder}); --hostile names their folder", file=sys.stderr)
        return {}, {}
    bad = sorted(path for path in folder.iterdir() if path.suffix != ".tsv")
    good = sorted(make_images(SMALL).iterdir())[:_GOOD_NEIGHBOURS]
    mixed = BENCH / f"{SMALL}-hostile"
    names = hostile.mix(good, bad, mixed)
    skipping = {name: each for name, each in skipping_contenders().items() if name in contenders}
    as_it_is = {name: _losses(name, each, mixed, *names) for name, each in contenders.items()}
    return as_it_is, {name: _losses(name, each, mixed, *names) for name, each in skipping.items()}


def _losses(name: str, contender: Contender, images: Path, good: Sequence[str], bad: Sequence[str]) -> hostile.Losses:
    output = output_of(_OUTPUT, f"{name} hostile")
    watched = run_contender(f"{name} hostile", contender, images, output, _HOSTILE_SECONDS)
    hangs = watched.samples[-1].at - watched.started_at > _HOSTILE_SECONDS
    ended = "hangs" if hangs else "dies" if watched.exit_code else "ends"
    found = hostile.count_losses(good, bad, *hostile.names_in(output), ended)
    print(f"hostile  {name:<34} {found}", file=sys.stderr, flush=True)
    return found


def _rounds(
    contenders: Mapping[str, Contender], images: Path, count: int, rounds: int, deadline: float
) -> tuple[list[Run], dict[str, str]]:
    """All contenders in turn; who fails is left out of the later rounds. No run begins after the deadline."""
    runs: list[Run] = []
    failed: dict[str, str] = {}
    for number in range(rounds):
        for name, contender in contenders.items():
            if name in failed or time.monotonic() > deadline:
                continue
            try:
                run = run_once(name, contender, number, images, output_of(_OUTPUT, name), _RUN_SECONDS)
            except RunFailed as err:
                lines = str(err).removeprefix(f"{name}: ").strip().splitlines()
                failed[name] = f"{lines[0]} {lines[-1]}" if len(lines) > 1 else lines[0]
                print(err, file=sys.stderr, flush=True)
                continue
            if run.images != count:
                failed[name] = f"expected {count} rows, got {run.images}"
            show(run)
            runs.append(run)
    return runs, failed


def _report(
    contenders: Mapping[str, Contender],
    runs: Sequence[Run],
    losses: Mapping[str, hostile.Losses],
    with_means: Mapping[str, hostile.Losses],
    failed: Mapping[str, str],
    args: argparse.Namespace,
) -> str:
    head = ["contender", "images/s", "of the plain loop", "CPU-ms an image", "peak RSS MB", "s to the first row", "rounds"]
    head += ["among hostile images", "with its own means against them"]
    rows = [
        [
            *_figures(name, runs),
            str(losses.get(name, "-")),
            str(with_means.get(name, _OURS_ALWAYS if each.is_ours else _NO_MEANS)),
        ]
        for name, each in contenders.items()
        if name in losses or any(run.contender == name for run in runs)
    ]
    noisy = sum(run.noisy for run in runs)
    left_out = "\n".join(f"- {name}: {reason.rstrip('.')}." for name, reason in (dict(failed) | _NOT_HAD).items())
    return (
        f"\n### Peers, {args.count} JPEGs of about 640x480, float32\n\n{results.machine()}. "
        f"{noisy} of {len(runs)} runs were beside other work.\n\n{results.table(head, rows)}\n\nNot in the table:\n\n{left_out}\n"
    )


def _figures(name: str, runs: Sequence[Run]) -> list[str]:
    chosen = _kept(name, runs)
    if not chosen:
        return [name, "-", "-", "-", "-", "-", "0"]
    share = results.ratios([*chosen, *_kept(REFERENCE, runs)], name, REFERENCE)

    def median(of: str) -> float:
        return statistics.median(getattr(run, of) for run in chosen)

    return [
        f"{name} *" if chosen[0].noisy else name,
        results.spread([run.images_per_second for run in chosen], ".1f"),
        results.spread(share, ".2f") if name != REFERENCE else "",
        f"{1000 * median('cpu_seconds_per_image'):.1f}",
        f"{median('peak_rss_mb'):,.0f}",
        f"{median('first_row_seconds'):.1f}",
        str(len(chosen)),
    ]


def _kept(name: str, runs: Sequence[Run]) -> list[Run]:
    """A contender's runs beside no other work; all of its runs if there are none."""
    own = [run for run in runs if run.contender == name]
    return [run for run in own if not run.noisy] or own


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--count", type=int, default=_COUNT, help="images in a round (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=13.0, help="no run of a round begins later (default: %(default)s)")
    parser.add_argument(
        "--only", default="", help="contenders whose names contain one of these parts, with commas; and the plain loop"
    )
    parser.add_argument("--hostile", type=Path, metavar="FOLDER", help="damaged and odd images")
    return parser


if __name__ == "__main__":
    main()
