"""`detect-objects evaluate`, `python -m pipeline.evaluate`: how good an output is, whether it is better, or how far two agree.

detect-objects evaluate --detections out --ground-truth photos/labels --page evaluation.html
detect-objects evaluate --detections out --ground-truth annotations.json --reference other
detect-objects evaluate --detections out --reference other

Exit code 0: done; 2: a wrong command, or labels or rows that cannot be used; 130: stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.evaluate.agreement import compare
from models.evaluate.average_precision import RESAMPLES, Measurement, better, figures_of, measure, resample
from models.evaluate.mistakes import Mistakes, best_threshold, find_mistakes
from models.evaluate.text import comparison_lines, evaluation_lines, notes_of, verdict_of
from models.progress import printable
from pipeline.errors import WRONG, run_command
from pipeline.report.evaluation import render_evaluation
from pipeline.results.image_rows import read_rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 2 if an input cannot be used, or 130 if it was stopped."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if not (args.ground_truth or args.reference):
        parser.error("one of the arguments --ground-truth --reference is required")
    if args.page and not args.ground_truth:
        parser.error("--page needs --ground-truth")
    return run_command(lambda: _run(args), "nothing is evaluated", failed_code=WRONG)


def _run(args: argparse.Namespace) -> int:
    result, lines = _evaluate(args) if args.ground_truth else _compare(args)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    try:
        print("\n".join(map(printable, lines)), flush=True)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _compare(args: argparse.Namespace) -> tuple[Mapping[str, Any], list[str]]:
    result = compare(read_rows(args.detections), read_rows(args.reference), iou_threshold=args.iou_threshold, match=args.match)
    return result, comparison_lines(result)


def _evaluate(args: argparse.Namespace) -> tuple[Mapping[str, Any], list[str]]:
    outputs = [args.detections, *([args.reference] if args.reference else [])]
    measured = [
        measure(read_rows(each), args.ground_truth, match=args.match, multi_label=args.multi_label or each.endswith(".json"))
        for each in outputs
    ]
    draws = resample([each.matches for each in measured], args.resamples) if args.resamples else None
    result = figures_of(measured[0], None if draws is None else draws[0])
    threshold = best_threshold(measured[0].matches) if args.threshold is None else args.threshold
    mistakes = find_mistakes(measured[0], threshold)
    notes = notes_of(result, measured[0], mistakes)
    if args.reference and draws is not None:
        tested = better(measured[0], measured[1], draws)
        notes.insert(0, verdict_of(tested, measured[0].matches.n_images))
        result = {**result, "reference": {**figures_of(measured[1], draws[1]), **tested}}
    if args.page:
        _write_page(args, measured[0], result, mistakes, notes)
    return result, [*evaluation_lines(result, mistakes, args.top), *notes]


def _write_page(
    args: argparse.Namespace, measured: Measurement, result: Mapping[str, Any], mistakes: Mistakes, notes: Sequence[str]
) -> None:
    names = (args.detections, args.ground_truth)
    page = render_evaluation(measured, result, mistakes, names=names, notes=notes, images=args.images or "")
    Path(args.page).write_text(page, encoding="utf-8")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="detect-objects evaluate", description="How good an output is, whether it is better, or how far two agree."
    )
    add = parser.add_argument
    add(
        "--detections",
        required=True,
        metavar="PATH",
        help="results folder, folder, glob or file of rows, or COCO results (.json)",
    )
    add(
        "--ground-truth",
        metavar="PATH",
        help="COCO annotations (.json), folder of YOLO or Pascal VOC labels, or data.yaml",
    )
    add(
        "--reference", metavar="PATH", help="another output: which is better by the ground truth; without one, how far they agree"
    )
    add("--page", metavar="FILE", help="also write a page with curves, errors and pictures here")
    add("--images", metavar="FOLDER", help="where the images are now, for the page (default: as the rows name them)")
    add("--multi-label", action="store_true", help="count all labels of a box, as Darknet and Ultralytics do")
    add("--threshold", type=float, help="confidence at which errors are counted (default: the one with the highest F1)")
    match = "images by file name, with folders if names repeat; or always with folders (default: name)"
    add("--match", choices=["name", "path"], default="name", help=match)
    add("--resamples", type=int, default=RESAMPLES, help="for the intervals; 0: none (default: %(default)s)")
    add("--iou-threshold", type=float, default=0.5, help="without ground truth: least IoU of a pair (default: 0.5)")
    add("--top", type=int, default=20, help="show the AP of this many classes (default: 20)")
    add("--json", metavar="FILE", help="also write the figures here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
