"""`python -m models.evaluate`: the COCO average precision of an output, or its agreement with another output.

python -m models.evaluate --detections out/detections --ground-truth annotations.json [--match path] [--json FILE]
python -m models.evaluate --detections out/detections --reference other/detections
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.evaluate.agreement import compare
from models.evaluate.average_precision import FIGURES, evaluate
from models.evaluate.detection_rows import RowsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 2 if an input cannot be used."""
    args = _parser().parse_args(arguments)
    try:
        if args.reference is not None:
            result = compare(args.detections, args.reference, iou_threshold=args.iou_threshold, match=args.match)
            lines = _comparison_lines(result)
        else:
            result = evaluate(args.detections, args.ground_truth, match=args.match)
            lines = _evaluation_lines(result, args.top)
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except (RowsError, OSError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def _comparison_lines(result: Mapping[str, Any]) -> list[str]:
    return [
        f"{key.replace('_', ' '):<28} {f'{v:.5f}' if isinstance(v, float) else '-' if v is None else v}"
        for key, v in result.items()
    ]


def _evaluation_lines(result: Mapping[str, Any], top: int) -> list[str]:
    lines = [f"{FIGURES[key]:<34} {key:<10} {_figure(result[key])}" for key in FIGURES]
    classes = sorted(
        result["per_class"].items(), key=lambda named: (-1.0 if named[1] is None else named[1], named[0]), reverse=True
    )
    shown = classes[:top]
    if shown:
        more = f", {top} of {len(classes)}" if len(classes) > top else ""
        lines += ["", f"AP by class (highest first{more})", *(f"  {name:<30} {_figure(value)}" for name, value in shown)]
    lines += [
        "",
        f"{result['detections']} detections in {result['images']} ground-truth images; classes matched by {result['classes_by']}",
    ]
    if result["images_without_row"]:
        lines.append(f"{result['images_without_row']} ground-truth images have no row: they count as images without detections")
    if result["rows_without_ground_truth"]:
        lines.append(f"{result['rows_without_ground_truth']} rows have no ground truth: ignored")
    if result["detections_ignored"]:
        named = ", ".join(f"{name} ({n})" for name, n in list(result["detections_ignored"].items())[:10])
        lines.append(f"{sum(result['detections_ignored'].values())} detections of classes that are no category: ignored: {named}")
    if result["size_mismatches"]:
        lines.append(f"{result['size_mismatches']} images have another size in the ground truth: their boxes may not fit")
    return lines


def _figure(value: float | None) -> str:
    return "-".rjust(6) if value is None else f"{value:6.3f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.evaluate", description="COCO AP of an output, or its agreement with another."
    )
    parser.add_argument("--detections", required=True, help="folder, glob or file of JSON Lines, or COCO results (.json)")
    against = parser.add_mutually_exclusive_group(required=True)
    against.add_argument("--ground-truth", help="COCO annotations (.json)")
    against.add_argument("--reference", help="another output to compare with")
    parser.add_argument(
        "--match", choices=["name", "path"], default="name", help="images by file name, or with folders (default: name)"
    )
    parser.add_argument("--iou-threshold", type=float, default=0.5, help="with --reference: least IoU of a pair (default: 0.5)")
    parser.add_argument("--top", type=int, default=20, help="show the AP of this many classes (default: 20)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
