"""COCO average precision of an output against ground truth, and which of two outputs is better.

The figures are those of pycocotools. `models.evaluate.pairing` pairs images and classes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from models.evaluate import bootstrap
from models.evaluate.agreement import Match
from models.evaluate.coco_matching import AREAS, Boxes, Floats, Ints, Matches, best_labels, match_boxes
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
_RESAMPLED = ("AP", "AP50", "AP75", "AR_100")  # in the order of bootstrap.mean_figures


@dataclasses.dataclass(frozen=True, eq=False)
class Measurement:
    """An output beside its ground truth.

    Attributes:
      truth: COCO annotations.
      pairing: Which row belongs to which image.
      matches: Detections matched with objects; images count in the order of `truth["images"]`.
      labels_left_out: Detections left out since the same box has a more confident label.
    """

    truth: Mapping[str, Any]
    pairing: Pairing
    matches: Matches
    labels_left_out: int

    @functools.cached_property
    def class_names(self) -> list[str]:
        """Names by index of class."""
        return [str(category["name"]) for category in self.truth["categories"]]


def measure(detections: Source, ground_truth: TruthSource, *, match: Match = "name", multi_label: bool = False) -> Measurement:
    """Pairs an output with its ground truth and matches their boxes; see `evaluate`."""
    pairing = pair(read_rows(detections), read_truth(ground_truth), match)
    found, left_out = _detections(pairing, multi_label or str(detections).endswith(".json"))
    n_classes, n_images = len(pairing.truth["categories"]), len(pairing.truth["images"])
    return Measurement(pairing.truth, pairing, match_boxes(found, _objects(pairing.truth), n_classes, n_images), left_out)


def evaluate(
    detections: Source,
    ground_truth: TruthSource,
    *,
    match: Match = "name",
    multi_label: bool = False,
    resamples: int = 0,
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
    draws = bootstrap.resample([measured.matches], resamples)[0] if resamples else None
    return figures_of(measured, draws)


def figures_of(measured: Measurement, draws: Floats | None = None) -> dict[str, Any]:
    """The result of `evaluate`, with intervals from `draws`, `(resamples, 4)`."""
    precision, recall = measured.matches.curves()
    by_class = dict(zip(measured.class_names, zip(precision.mean(axis=(0, 2)), recall[0], strict=True), strict=True))
    pairing = measured.pairing
    return {
        **_figures(measured.matches, precision, recall),
        "per_class": {name: _or_none(value) for name, (value, _) in by_class.items()},
        "recall_per_class": {name: _or_none(value) for name, (_, value) in by_class.items()},
        "intervals": {} if draws is None else dict(zip(_RESAMPLED, map(bootstrap.interval, draws.T), strict=True)),
        "images": len(measured.truth["images"]),
        "images_without_row": len(measured.truth["images"]) - len(pairing.rows),
        "rows_without_ground_truth": len(pairing.unlabelled),
        "detections": len(measured.matches.detections),
        "detections_ignored": dict(pairing.ignored.most_common()),
        "labels_left_out": measured.labels_left_out,
        "classes_by": pairing.classes_by,
        "size_mismatches": pairing.size_mismatches,
    }


def better(ours: Measurement, theirs: Measurement, draws: Floats) -> dict[str, float]:
    """Whether an output is better than another with the same ground truth: the paired bootstrap test of AP.

    Args:
      ours: The output.
      theirs: The one to compare it with.
      draws: Resampled figures of both, `(2, resamples, 4)`.

    Returns:
      `difference` of AP, its 95 % interval `low` and `high`, and `p`; empty without objects.
    """
    value = bootstrap.mean_figures(ours.matches)[0] - bootstrap.mean_figures(theirs.matches)[0]
    return bootstrap.difference(float(value), draws[0, :, 0], draws[1, :, 0])


def _figures(matches: Matches, precision: Floats, recall: Floats) -> dict[str, float | None]:
    values = {"AP": precision, "AP50": precision[0], "AP75": precision[5], "AR_100": recall}
    values |= {f"AR_{most}": matches.curves(most=most)[1] for most in (1, 10)}
    for index, area in list(enumerate(AREAS))[1:]:
        values[f"AP_{area}"], values[f"AR_{area}"] = matches.curves(index)
    return {
        name: _or_none(np.mean(values[name][np.isfinite(values[name])])) if np.isfinite(values[name]).any() else None
        for name in FIGURES
    }


def _or_none(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _objects(truth: Mapping[str, Any]) -> Boxes:
    """The annotations as boxes."""
    image_index = {image["id"]: index for index, image in enumerate(truth["images"])}
    class_index = {category["id"]: index for index, category in enumerate(truth["categories"])}
    known = [one for one in truth["annotations"] if one["image_id"] in image_index and one["category_id"] in class_index]
    xywh = np.array([one["bbox"] for one in known], np.float64).reshape(-1, 4)
    return Boxes(
        images=_whole(image_index[one["image_id"]] for one in known),
        classes=_whole(class_index[one["category_id"]] for one in known),
        xyxy=np.concatenate([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], axis=1),
        scores=np.ones(len(known)),
        areas=np.array([one["area"] for one in known], np.float64),
        crowd=np.array([bool(one["iscrowd"]) for one in known], bool),
    )


def _detections(pairing: Pairing, multi_label: bool) -> tuple[Boxes, int]:
    """The detections of classes that have a category, and how many labels of one box are left out."""
    class_index = {category["id"]: index for index, category in enumerate(pairing.truth["categories"])}
    image_index = {image["id"]: index for index, image in enumerate(pairing.truth["images"])}
    columns = [
        (image_index[image_id], class_index[pairing.categories[named]], row.boxes_xyxy[n], float(row.scores[n]))
        for image_id, row in pairing.rows.items()
        for n, named in enumerate(zip(row.class_names, row.class_ids, strict=True))
        if named in pairing.categories
    ]
    images, classes, boxes, scores = zip(*columns, strict=True) if columns else ((), (), (), ())
    xyxy = np.array(boxes, np.float64).reshape(-1, 4)
    areas = np.prod(xyxy[:, 2:] - xyxy[:, :2], axis=1)
    found = Boxes(_whole(images), _whole(classes), xyxy, np.array(scores, np.float64), areas, np.zeros(len(images), bool))
    kept = found if multi_label else best_labels(found)
    return kept, len(found) - len(kept)


def _whole(numbers: Any) -> Ints:
    return np.array(list(numbers), np.int64)
