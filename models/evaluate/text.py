"""The lines that `detect-objects evaluate` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.evaluate.average_precision import FIGURES, Measurement
from models.evaluate.mistakes import Mistakes

_LOW_CONFIDENCE = 0.05  # a higher lowest confidence cuts the precision-recall curve short
_FEW_PAIRS = 10


def comparison_lines(result: Mapping[str, Any]) -> list[str]:
    """The result of `compare`."""
    return [
        f"{key.replace('_', ' '):<28} {f'{v:.5f}' if isinstance(v, float) else '-' if v is None else v}"
        for key, v in result.items()
    ]


def evaluation_lines(result: Mapping[str, Any], mistakes: Mistakes, top: int) -> list[str]:
    """The result of `evaluate`, the classes with the lowest AP, and the figures at the threshold."""
    lines = [f"{FIGURES[key]:<34} {key:<10} {_figure(result[key])}{_interval(result, key)}" for key in FIGURES]
    known = {name: value for name, value in result["per_class"].items() if value is not None}
    shown = sorted(known.items(), key=lambda named: (named[1], named[0]))[:top]
    if shown:
        more = f", {top} of {len(known)}" if len(known) > top else ""
        lines += ["", f"{f'AP by class (lowest first{more})':<42} AP  recall"]
        lines += [f"  {name:<36} {_figure(value)}  {_figure(result['recall_per_class'][name])}" for name, value in shown]
    of_classes = mistakes.confusion[:-1, :-1]
    right, found, objects = int(of_classes.trace()), int(mistakes.confusion[:, :-1].sum()), int(mistakes.confusion[:-1].sum())
    precision, recall = (f"{right / total:.3f}" if total else "-" for total in (found, objects))
    return [
        *lines,
        "",
        f"at confidence {mistakes.threshold:.2f} and IoU 0.50: precision {precision}, recall {recall}",
        f"{result['detections']} detections in {result['images']} ground-truth images; classes matched by {result['classes_by']}",
    ]


def notes_of(result: Mapping[str, Any], measured: Measurement, mistakes: Mistakes) -> list[str]:
    """What a reader has to know of the figures, a line each."""
    notes = []
    if result["images_without_row"]:
        notes.append(f"{result['images_without_row']} ground-truth images have no row: they count as images without detections")
    if result["rows_without_ground_truth"]:
        notes.append(f"{result['rows_without_ground_truth']} rows have no ground truth: ignored")
    if ignored := result["detections_ignored"]:
        named = ", ".join(f"{name} ({n})" for name, n in list(ignored.items())[:10])
        notes.append(f"{sum(ignored.values())} detections of classes that are no category: ignored: {named}")
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


def verdict_of(tested: Mapping[str, Any], images: int) -> str:
    """Whether an output is better than another, in one line."""
    if not tested:
        return "no object is labelled: which output is better cannot be told"
    sure = tested["low"] > 0 or tested["high"] < 0
    word = ("better" if tested["difference"] > 0 else "worse") if sure else "not shown to differ"
    interval = f"95 % interval {tested['low']:+.3f} to {tested['high']:+.3f}, p = {tested['p']:.3f}"
    return f"{word}: AP {tested['difference']:+.3f} beside the reference ({interval}, {images} images)"


def _figure(value: float | None) -> str:
    return "-".rjust(6) if value is None else f"{value:6.3f}"


def _interval(result: Mapping[str, Any], key: str) -> str:
    ends = result["intervals"].get(key)
    return f"   95 % interval {ends[0]:.3f} to {ends[1]:.3f}" if ends else ""
