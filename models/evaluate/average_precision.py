"""COCO average precision of an output against ground truth, and which of two outputs is better.

The figures are those of pycocotools. `models.evaluate.pairing` pairs images and classes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from models.base.progress import shown
from models.evaluate.agreement import Match
from models.evaluate.coco_matching import AREAS, Boxes, Floats, Matches, best_labels, match_boxes
from models.evaluate.detection_rows import Source, read_rows
from models.evaluate.ground_truth import TruthSource, read_truth
from models.evaluate.pairing import Pairing, pair

# in the order of COCOeval.stats: https://cocodataset.org/#detection-eval
FIGURES = {
    "AP": "AP at IoU 0.50:0.95",
    "AP50": "AP at IoU 0.50",
    "AP75": "AP at IoU 0.75",
    "AP_small": "AP, objects up to 32x32 pixels",
    "AP_medium": "AP, objects up to 96x96 pixels",
    "AP_large": "AP, larger objects",
    "AR_1": "AR with 1 detection per image",
    "AR_10": "AR with 10 detections per image",
    "AR_100": "AR with 100 detections per image",
    "AR_small": "AR, objects up to 32x32 pixels",
    "AR_medium": "AR, objects up to 96x96 pixels",
    "AR_large": "AR, larger objects",
}
RESAMPLES = 1000  # of a bootstrap
_RESAMPLED = ("AP", "AP50", "AP75", "AR_100")


@dataclasses.dataclass(frozen=True, eq=False)
class Measurement:
    """An output beside its ground truth.

    Attributes:
      pairing: Which row belongs to which image.
      matches: Detections matched with objects.
      labels_left_out: Detections left out since the same box has a more confident label.
    """

    pairing: Pairing
    matches: Matches
    labels_left_out: int


def measure(detections: Source, ground_truth: TruthSource, *, match: Match = "name", multi_label: bool = False) -> Measurement:
    """Pairs an output with its ground truth and matches their boxes; see `evaluate`."""
    pairing = pair(read_rows(detections), read_truth(ground_truth), match)
    found = _detections(pairing)
    is_coco = isinstance(detections, str | os.PathLike) and os.fspath(detections).endswith(".json")
    kept = found if multi_label or is_coco else best_labels(found)
    labels = pairing.labels
    matches = match_boxes(kept, labels.objects, len(labels.class_names), len(labels.file_names))
    return Measurement(pairing, matches, len(found) - len(kept))


def evaluate(
    detections: Source, ground_truth: TruthSource, *, match: Match = "name", multi_label: bool = False, resamples: int = 0
) -> dict[str, Any]:
    """Computes COCO's twelve figures, and AP and recall of each class.

    Args:
      detections: An output; see `models.evaluate.detection_rows.read_rows`.
      ground_truth: Labels; see `models.evaluate.ground_truth.read_truth`.
      match: How rows find their image; see `models.evaluate.pairing.pair`.
      multi_label: Whether all labels of one box count, as with Darknet and Ultralytics, or the most confident one. All
        labels of COCO results (`.json`) count.
      resamples: Bootstrap resamples for the intervals; 0: no intervals.

    Returns:
      The keys of `FIGURES` (in 0..1; None if the ground truth has no such object), `per_class`, the AP by category name, and
      `recall_per_class` at IoU 0.50. `intervals` has 95 % intervals by figure. The other keys describe the pairing: `images` of
      the ground truth, `images_without_row` (they count as images without detections), `rows_without_ground_truth` (ignored),
      `detections` that count, `detections_ignored` by class without a category, `labels_left_out`, `classes_by` (`name`,
      `class_id` or `category_id`), and `size_mismatches`, images whose sizes differ.

    Raises:
      RowsError: A file cannot be read, a row fits several images, or no row or class fits any.
    """
    measured = measure(detections, ground_truth, match=match, multi_label=multi_label)
    return figures_of(measured, resample([measured.matches], resamples)[0] if resamples else None)


def figures_of(measured: Measurement, draws: Floats | None = None) -> dict[str, Any]:
    """The result of `evaluate`, with intervals from `draws`, `(resamples, 4)`."""
    matches, pairing, names = measured.matches, measured.pairing, measured.pairing.labels.class_names
    precision, recall = matches.curves()
    values = {"AP": precision, "AP50": precision[0], "AP75": precision[5], "AR_100": recall}
    values |= {f"AR_{most}": matches.curves(most=most)[1] for most in (1, 10)}
    for index, area in list(enumerate(AREAS))[1:]:
        values[f"AP_{area}"], values[f"AR_{area}"] = matches.curves(index)
    return {
        **{name: _or_none(_mean(values[name])) for name in FIGURES},
        "per_class": dict(zip(names, map(_or_none, precision.mean(axis=(0, 2))), strict=True)),
        "recall_per_class": dict(zip(names, map(_or_none, recall[0]), strict=True)),
        "intervals": {} if draws is None else dict(zip(_RESAMPLED, map(interval, draws.T), strict=True)),
        "images": matches.n_images,
        "images_without_row": matches.n_images - len(pairing.rows),
        "rows_without_ground_truth": len(pairing.unlabelled),
        "detections": len(matches.detections),
        "detections_ignored": dict(pairing.ignored.most_common()),
        "labels_left_out": measured.labels_left_out,
        "classes_by": pairing.classes_by,
        "size_mismatches": pairing.size_mismatches,
    }


def _mean(values: Floats) -> float:
    """The mean of what is known; NaN of nothing."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _or_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _detections(pairing: Pairing) -> Boxes:
    """The detections whose class has a category."""
    rows = pairing.rows.values()
    named = [each for row in rows for each in zip(row.class_names, row.class_ids, strict=True)]
    images = np.repeat(list(pairing.rows), [len(row.scores) for row in rows])
    classes = np.array([pairing.classes.get(each, -1) for each in named], np.int64)
    xyxy, scores = np.concatenate([row.boxes_xyxy for row in rows]), np.concatenate([row.scores for row in rows])
    areas, crowd = np.prod(xyxy[:, 2:] - xyxy[:, :2], axis=1), np.zeros(len(xyxy), bool)
    return Boxes(images, classes, xyxy, scores, areas, crowd)[classes >= 0]


def mean_figures(matches: Matches, weights: Floats | None = None) -> Floats:
    """AP, AP50, AP75 and AR_100, with images that count so many times; NaN without objects."""
    precision, recall = matches.curves(weights=weights)
    return np.array([_mean(each) for each in (precision, precision[0], precision[5], recall)])


def resample(outputs: Sequence[Matches], resamples: int = RESAMPLES) -> Floats:
    """The figures of `mean_figures` on images drawn with replacement: `(outputs, resamples, 4)`; outputs get the same draws."""
    generator, n = np.random.default_rng(0), outputs[0].n_images
    draws = shown(range(resamples), "bootstrap", "resamples")
    weights = (np.bincount(generator.integers(0, n, n), minlength=n).astype(np.float64) for _ in draws)
    return np.array([[mean_figures(each, weight) for each in outputs] for weight in weights]).transpose(1, 0, 2)


def interval(values: Floats) -> tuple[float, float] | None:
    """The 95 % percentile interval of resampled figures; None without any."""
    known = values[np.isfinite(values)]
    return (float(np.percentile(known, 2.5)), float(np.percentile(known, 97.5))) if len(known) else None


def better(ours: Measurement, theirs: Measurement, draws: Floats) -> dict[str, float]:
    """Whether an output is better than another with the same ground truth: the paired bootstrap test of AP.

    Args:
      ours: The output.
      theirs: The one to compare it with.
      draws: Resampled figures of both, `(2, resamples, 4)`.

    Returns:
      `difference` of AP, its 95 % interval `low` and `high`, and `p`: twice the share of resamples on the other side of zero, at
      least 2 / (resamples + 1); empty without objects.
    """
    resampled = draws[0, :, 0] - draws[1, :, 0]
    resampled = resampled[np.isfinite(resampled)]
    ends = interval(resampled)
    if ends is None:
        return {}
    difference = float(mean_figures(ours.matches)[0] - mean_figures(theirs.matches)[0])
    tail = min(int((resampled <= 0).sum()), int((resampled >= 0).sum()))
    return {"difference": difference, "low": ends[0], "high": ends[1], "p": min(1.0, 2 * (tail + 1) / (len(resampled) + 1))}
