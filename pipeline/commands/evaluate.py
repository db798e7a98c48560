"""`detect-objects evaluate`: how good an output is, whether it is better, or how far two agree.

detect-objects evaluate --detections out --ground-truth photos/labels --page evaluation.html
detect-objects evaluate --detections out --ground-truth annotations.json --reference other
detect-objects evaluate --detections out --reference other

Exit code 0: done; 1: storage does not answer, or the disk is full; 2: a wrong command, or labels or rows that cannot be used;
130: stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from models.evaluate.agreement import compare
from models.evaluate.average_precision import FIGURES, RESAMPLES, Measurement, better, figures_of, measure, resample
from models.evaluate.mistakes import Mistakes, best_threshold, figures_at, find_mistakes
from pipeline.config.paths import local_path
from pipeline.errors import WRONG, CommandParser, run_command
from pipeline.log_lines import plural, say
from pipeline.report.evaluation import render_evaluation
from pipeline.results.current import read_rows
from pipeline.results.wanted import ALL, add_row_flags, wanted_rows
from pipeline.storage.files import file_to_write, write_file

_LOW_CONFIDENCE = 0.05  # a higher lowest confidence cuts the precision-recall curve short
_FEW_PAIRS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 2 if an input cannot be used, or 130 if it was stopped."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if not (args.ground_truth or args.reference):
        parser.error("one of the arguments --ground-truth --reference is required")
    if args.page and not args.ground_truth:
        parser.error("--page needs --ground-truth")
    if args.reference and args.ground_truth and args.resamples < 1:
        parser.error("--reference beside --ground-truth needs --resamples of 1 or more: they tell which output is better")
    return run_command(lambda: _run(args), "nothing is evaluated", failed_code=WRONG)


def _run(args: argparse.Namespace) -> int:
    inputs = (args.detections, args.ground_truth, args.reference)
    figures = file_to_write("--json", local_path(args.json), inputs) if args.json else ""
    page = file_to_write("--page", local_path(args.page), (*inputs, figures)) if args.page else ""
    result, lines = _evaluate(args, page) if args.ground_truth else _compare(args)
    if figures:
        write_file(figures, (json.dumps(result, indent=2) + "\n").encode())
    try:
        say(lines)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _compare(args: argparse.Namespace) -> tuple[Mapping[str, Any], list[str]]:
    rows = read_rows(args.detections, wanted_rows(args))
    result = compare(rows, read_rows(args.reference), iou_threshold=args.iou_threshold, match=args.match)
    shown = {
        key: f"{value:.5f}" if isinstance(value, float) else "-" if value is None else value for key, value in result.items()
    }
    return result, [f"{key.replace('_', ' '):<28} {value}" for key, value in shown.items()]


def _evaluate(args: argparse.Namespace, page: str) -> tuple[Mapping[str, Any], list[str]]:
    outputs = [(args.detections, wanted_rows(args)), *([(args.reference, ALL)] if args.reference else [])]
    measured = [
        measure(
            read_rows(each, wanted), args.ground_truth, match=args.match, multi_label=args.multi_label or each.endswith(".json")
        )
        for each, wanted in outputs
    ]
    draws = resample([each.matches for each in measured], args.resamples) if args.resamples else None
    result = figures_of(measured[0], None if draws is None else draws[0])
    threshold = best_threshold(measured[0].matches) if args.threshold is None else args.threshold
    mistakes = find_mistakes(measured[0], threshold)
    notes = _notes_of(result, measured[0], mistakes)
    if args.reference and draws is not None:
        tested = better(measured[0], measured[1], draws)
        notes.append(_verdict_of(tested, measured[0].matches.n_images))  # the last line is the answer
        result = {**result, "reference": {**figures_of(measured[1], draws[1]), **tested}}
    if page:
        names = (args.detections, args.ground_truth)
        html = render_evaluation(measured[0], result, mistakes, names=names, notes=notes, images=args.images or "")
        write_file(page, html.encode())
    return result, [*_evaluation_lines(result, measured[0], threshold, args.top), *notes]


def _evaluation_lines(result: Mapping[str, Any], measured: Measurement, threshold: float, top: int) -> list[str]:
    """The result of `evaluate`, the classes with the lowest AP, and the figures at the threshold, as the page has them."""
    at = figures_at(measured.matches, threshold)
    lines = [f"{FIGURES[key]:<34} {key:<10} {_figure(result[key])}{_interval(result, key)}" for key in FIGURES]
    known = {name: value for name, value in result["per_class"].items() if value is not None}
    shown = sorted(known.items(), key=lambda named: (named[1], named[0]))[:top]
    if shown:
        more = f", {top} of {len(known)}" if len(known) > top else ""
        lines += ["", f"{f'AP by class (lowest first{more})':<42} AP  recall"]
        lines += [f"  {name:<36} {_figure(value)}  {_figure(result['recall_per_class'][name])}" for name, value in shown]
    precision, recall = ("-" if math.isnan(at[name]) else f"{at[name]:.3f}" for name in ("precision", "recall"))
    return [
        *lines,
        "",
        f"at confidence {threshold:.2f} and IoU 0.50: precision {precision}, recall {recall}",
        f"{plural(result['detections'], 'detection')} in {plural(result['images'], 'ground-truth image')}; "
        f"classes matched by {result['classes_by']}",
    ]


def _notes_of(result: Mapping[str, Any], measured: Measurement, mistakes: Mistakes) -> list[str]:
    """What a reader has to know of the figures, a line each."""
    notes = []
    if result["images_without_row"]:
        images = plural(result["images_without_row"], "ground-truth image")
        notes.append(f"{images} without a row: counted as without detections")
    if result["rows_without_ground_truth"]:
        notes.append(f"{plural(result['rows_without_ground_truth'], 'row')} without ground truth: ignored")
    if ignored := result["detections_ignored"]:
        named = ", ".join(f"{name} ({n})" for name, n in list(ignored.items())[:10])
        notes.append(f"{plural(sum(ignored.values()), 'detection')} of classes that are no category: ignored: {named}")
    if result["labels_left_out"]:
        notes.append(f"{result['labels_left_out']} further labels of boxes are left out: --multi-label counts them, too")
    if result["size_mismatches"]:
        notes.append(f"{result['size_mismatches']} images have another size in the ground truth: their boxes may not fit")
    lowest = measured.matches.detections.scores.min(initial=1.0)
    if result["detections"] and lowest > _LOW_CONFIDENCE:
        notes.append(f"the lowest confidence is {lowest:.2f}: AP needs lower ones, too (run with --score-threshold 0.001)")
    pairs = mistakes.confusion[:-1, :-1]
    if pairs.sum() >= _FEW_PAIRS and 2 * pairs.trace() < pairs.sum():
        notes.append(
            f"{pairs.sum() - pairs.trace()} of {pairs.sum()} boxes that fit have another class: is the order of classes right?"
        )
    return notes


def _verdict_of(tested: Mapping[str, Any], images: int) -> str:
    """Whether an output is better than another, in one line."""
    if not tested:
        return "no object is labelled: which output is better cannot be told"
    sure = tested["low"] > 0 or tested["high"] < 0
    word = ("better" if tested["difference"] > 0 else "worse") if sure else "not shown to differ"
    interval = f"95 % interval {tested['low']:+.3f} to {tested['high']:+.3f}, p = {tested['p']:.3f}"
    return f"{word}: AP {tested['difference']:+.3f} beside the reference ({interval}, {plural(images, 'image')})"


def _figure(value: float | None) -> str:
    return "-".rjust(6) if value is None else f"{value:6.3f}"


def _interval(result: Mapping[str, Any], key: str) -> str:
    ends = result["intervals"].get(key)
    return f"   95 % interval {ends[0]:.3f} to {ends[1]:.3f}" if ends else ""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog="detect-objects evaluate", description="How good an output is, whether it is better, or how far two agree."
    )
    add = parser.add_argument
    add(
        "--detections",
        required=True,
        metavar="PATH",
        help="results folder, folder, glob or file of rows, or COCO results (.json)",
    )
    add("--ground-truth", metavar="PATH", help="COCO annotations (.json), folder of YOLO or Pascal VOC labels, or data.yaml")
    add(
        "--reference", metavar="PATH", help="another output: which is better by the ground truth; without one, how far they agree"
    )
    add_row_flags(parser)
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
