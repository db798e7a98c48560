"""Other people's ways to do the work, beside the pipeline: one run, one network, the same images, alternated rounds.

    python -m tests.benchmarks.peers                                        # make bench-peers, which makes the environments
    python -m tests.benchmarks.peers --rounds 1 --count 32 --only Daft      # while developing

1. Rows of 64 good images with one unreadable file among them, without and with the contender's own means against it, if any.
2. JPEGs of about 640x480, with YOLOv4-tiny's network at float32.
3. JPEGs of 640x480 and of 96x96, with an engine that costs nothing: what is left is reading, decoding, resizing, and rows.

A contender that fails, or whose environment is missing, is named below the tables with the reason; the others go on.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.benchmarks import results, work
from tests.benchmarks.contenders import OURS, REFERENCE, Contender, module, ours, own_contenders
from tests.benchmarks.feeding import make_images as make_free_images
from tests.benchmarks.images import BENCH, SMALL, link_images, make_images
from tests.benchmarks.model import make_model, make_onnx
from tests.benchmarks.peers import ENVIRONMENTS, python_of
from tests.benchmarks.rounds import Run, count_rows, file_name, run_rounds, start_once

_OUTPUT = BENCH / "out" / "peers"
_GOOD, _BAD_SECONDS = 64, 180.0
_FREE = {"640x480": ((640, 480), 4096), "96x96": ((96, 96), 16384)}


def _peer(name: str, *flags: str, environment: str = "") -> Contender:
    """One of this folder, in an environment of its own or in the project's."""
    return module(f"peers.{name}", *flags, python=python_of(environment) if environment else sys.executable)


_FRAMEWORKS = {
    "Daft": _peer("daft_frame", environment="frameworks"),
    "Ray Data": _peer("ray_data", environment="frameworks"),
    "PyTorch's DataLoader": _peer("data_loader", environment="torch"),
}
_ONNX = ("--model", str(BENCH / "model.onnx"))
CONTENDERS = {
    REFERENCE: own_contenders()[REFERENCE],
    OURS: ours(),
    "ours on OpenVINO, float32": ours(config="tests/benchmarks/peers/ours_openvino.yaml"),
    "OpenVINO's loop": _peer("onnx_loops", *_ONNX, "--engine", "openvino"),
    "ONNX Runtime's loop": _peer("onnx_loops", *_ONNX, "--engine", "onnxruntime"),
    "tfx_bsl RunInference": _peer("tfx_bsl_bytes"),
    "Beam as documented": _peer("beam_documented", environment="frameworks"),
    **_FRAMEWORKS,
    "Triton (PyTriton)": _peer("triton", environment="triton"),
}
_SKIPPING = ("Beam as documented", "Daft", "Ray Data")  # they have something against bad images
_LOOP = "loop, no network"
FREE_CONTENDERS = {
    _LOOP: module("plain_loop", "--model", work.FREE)._replace(against=_LOOP),
    "ours, no network": ours("--engine", "tests.benchmarks.free_engine:open_model", config="")._replace(against=_LOOP),
    **{
        f"{name}, no network": each.with_flags("--model", work.FREE)._replace(against=_LOOP) for name, each in _FRAMEWORKS.items()
    },
}


def main() -> None:
    """Runs all, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=384, help="images with the network (default: %(default)s)")
    parser.add_argument("--free-count", type=int, help="without; default: 4,096 and 16,384")
    parser.add_argument(
        "--only", default="", help="contenders whose names contain one of these parts, with commas, and the loops"
    )
    args = parser.parse_args()
    failed = _missing()
    make_model()
    if not failed.get("frameworks"):
        make_onnx(python_of("frameworks"))
    contenders = _chosen(CONTENDERS, args.only, failed)
    images = link_images(make_images(SMALL), BENCH / f"{SMALL}-{args.count}", args.count)
    of_bad = {name: _with_a_bad_image(name, each) for name, each in contenders.items()}
    runs = run_rounds(contenders, images, args.count, args.rounds, _OUTPUT, failed)
    tables = {f"{args.count} JPEGs of about 640x480, float32": _table(contenders, runs, of_bad)}
    free = _chosen(FREE_CONTENDERS, args.only, failed)
    for name, (wh, usual) in _FREE.items():
        count = args.free_count or usual
        folder = BENCH / f"free-{name}-{count}"
        if not folder.exists():
            make_free_images(folder, wh, count)
        tables[f"{count} JPEGs of {name}, no network"] = _table(
            free, run_rounds(free, folder, count, args.rounds, _OUTPUT, failed), {}
        )
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"\n{commit}: {results.machine()}; {_versions()}; medians of {args.rounds} rounds")
    print(*(f"\n### {title}\n\n{table}" for title, table in tables.items()), sep="\n")
    print("\nFailed:", *(f"- {name}: {reason}" for name, reason in failed.items()), sep="\n", flush=True)


def _missing() -> dict[str, str]:
    """The environments that could not be made, each with the reason."""
    names = {name: Path(f"{ENVIRONMENTS}/{name}.log") for name in ("frameworks", "torch", "triton")}
    missing = {name: log for name, log in names.items() if not (ENVIRONMENTS / name / ".ready").exists()}
    return {name: log.read_text().strip().splitlines()[-1] if log.exists() else "not made" for name, log in missing.items()}


def _chosen(contenders: Mapping[str, Contender], only: str, missing: Mapping[str, str]) -> dict[str, Contender]:
    pythons = [python_of(name) for name in missing]
    return {
        name: each
        for name, each in contenders.items()
        if any(part in name for part in [*only.split(","), each.against]) and each.command(Path(), Path())[0] not in pythons
    }


def _with_a_bad_image(name: str, contender: Contender) -> list[str]:
    """What becomes of good images beside one that cannot be read, without and with the contender's own means."""
    folder = BENCH / "one-bad"
    link_images(make_images(SMALL), folder, _GOOD)
    (folder / f"{_GOOD // 2:06d}-bad.jpg").write_bytes(bytes(1000))
    ways = [contender, *([contender.with_flags("--skip-bad")] if name in _SKIPPING else [])]
    found = []
    for way in ways:
        watched = start_once(f"{name} bad", way, folder, _OUTPUT / file_name(f"{name} bad"), _BAD_SECONDS)
        lost = _GOOD - count_rows(_OUTPUT / file_name(f"{name} bad"))
        found.append(f"{lost} of {_GOOD}" + (", and it fails" if watched.exit_code else ""))
        print(f"one bad image  {name:<34} {found[-1]} lost", file=sys.stderr, flush=True)
    return [*found, "always on" if contender.is_ours else "has none"][:2]


def _table(contenders: Mapping[str, Contender], runs: Sequence[Run], of_bad: Mapping[str, Sequence[str]]) -> str:
    head = ["system", "images/s", "of the loop", "CPU-ms an image", "peak MB", "s to the first row"]
    head += ["good images lost", "with its switch"] if of_bad else []
    rows = []
    for name, contender in contenders.items():
        if own := [run for run in runs if run.contender == name]:
            rows.append(
                [
                    name,
                    results.spread([run.images_per_second for run in own], ".1f"),
                    results.spread(results.ratios(runs, name, contender.against), ".2f") if name != contender.against else "",
                    f"{1000 * statistics.median(run.cpu_seconds_per_image for run in own):.2f}",
                    f"{statistics.median(run.peak_rss_mb for run in own):,.0f}",
                    f"{statistics.median(run.first_row_seconds for run in own):.1f}",
                    *of_bad.get(name, []),
                ]
            )
    return results.table(head, rows)


def _versions() -> str:
    """Of what the environments hold."""
    pins = [line for lock in Path(__file__).parent.glob("*.lock") for line in lock.read_text().splitlines()]
    wanted = ("ray==", "daft==", "torch==", "nvidia-pytriton==")
    return ", ".join(sorted(pin for pin in pins if pin.startswith(wanted)))


if __name__ == "__main__":
    main()
