"""What goes wrong at one confidence threshold: errors by kind, the confusion matrix, calibration, and what to label next."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

import numpy as np

from models.base.progress import shown
from models.evaluate.average_precision import Measurement
from models.evaluate.coco_matching import Boxes, Floats, Ints, Matches, best_labels
from models.geometry import greedy_pairs, iou_matrix

Kind = Literal["miss", "false positive", "wrong class", "poorly placed"]

IOU_THRESHOLD = 0.5
_SOME_OVERLAP = 0.1  # from here on, a box of the right class is poorly placed and not a false positive
CONFIDENCES = np.linspace(0, 1, 101).round(2)  # 0.7 itself, not the float above it


@dataclasses.dataclass(frozen=True, slots=True)
class Mistake:
    """A detection that is wrong, or an object that was missed.

    Attributes:
      kind: What is wrong.
      image: Index of the image.
      detection: Index of the detection in `Mistakes.detections`; -1 for a miss.
      object: Index of the object in `Mistakes.objects`; -1 for a false positive.
      weight: The confidence; of a miss, the share of the image's largest object, so that conspicuous ones come first.
      iou: Of the two boxes, 0 without one of them.
    """

    kind: Kind
    image: int
    detection: int
    object: int
    weight: float
    iou: float


@dataclasses.dataclass(frozen=True, eq=False)
class Mistakes:
    """An output at a confidence threshold.

    Attributes:
      threshold: Detections from here on count.
      detections: These detections; of several labels of a box the most confident one.
      objects: The objects that count.
      confusion: `(classes + 1, classes + 1)` numbers of objects by class (rows) and detected class (columns); last: none.
      mistakes: All of them.
    """

    threshold: float
    detections: Boxes
    objects: Boxes
    confusion: Ints
    mistakes: list[Mistake]


def threshold_curves(matches: Matches, confidences: Floats = CONFIDENCES) -> dict[str, Floats]:
    """`precision`, `recall` and `f1` at IoU 0.50 over all classes together, at each of some confidences."""
    counted = ~matches.ignored[0, 0]
    scores, hits = matches.detections.scores[counted], matches.hit[0, 0][counted]
    order = np.argsort(scores)
    before = np.searchsorted(scores[order], confidences)
    found = np.append(np.cumsum(hits[order][::-1])[::-1], 0)[before]
    shown, objects = len(scores) - before, max(int(matches.counts[0].sum()), 1)
    return {
        "precision": np.divide(found, shown, out=np.full(len(confidences), np.nan), where=shown > 0),
        "recall": found / objects,
        "f1": 2 * found / (shown + objects),
    }


def figures_at(matches: Matches, threshold: float) -> dict[str, float]:
    """`precision`, `recall` and `f1` at IoU 0.50 over all classes together, at one confidence; NaN where there is none."""
    return {name: float(curve[0]) for name, curve in threshold_curves(matches, np.array([threshold])).items()}


def best_threshold(matches: Matches) -> float:
    """The confidence, to 0.01, with the highest F1; the middle one of equal ones."""
    f1 = threshold_curves(matches)["f1"]
    best = np.flatnonzero(f1 == f1.max())
    return float(CONFIDENCES[best[len(best) // 2]])


def calibration(matches: Matches) -> tuple[list[tuple[float, float, int]], float]:
    """How often detections of a confidence are right.

    Returns:
      (Mean confidence, share that is right at IoU 0.50, number) of each bin of equal width, NaN if it is empty; and the expected
      calibration error: the mean distance of the two, weighted by number.
    """
    counted, bins = ~matches.ignored[0, 0], 10
    scores, hits = matches.detections.scores[counted], matches.hit[0, 0][counted]
    of_bin = np.clip((scores * bins).astype(int), 0, bins - 1)
    numbers, sums, right = (np.bincount(of_bin, weights, bins) for weights in (None, scores, hits))
    means, shares = (np.divide(each, numbers, out=np.full(bins, np.nan), where=numbers > 0) for each in (sums, right))
    error = float(np.nansum(np.abs(means - shares) * numbers) / max(len(scores), 1))
    return list(zip(means.tolist(), shares.tolist(), numbers.astype(int).tolist(), strict=True)), error


def find_mistakes(measured: Measurement, threshold: float) -> Mistakes:
    """Pairs detections with objects one to one, first those of one class, then the others.

    A pair has an IoU of at least 0.5; pairs are taken by descending IoU. A pair of two classes is of a wrong class. A detection
    without an object is poorly placed if it overlaps an object of its class that nothing else found, else a false positive. An
    object without a detection is a miss. Detections on a crowd of their class do not count.
    """
    matches = measured.matches
    above = best_labels(matches.detections[matches.detections.scores >= threshold])
    ordered = matches.objects[np.argsort(matches.objects.images, kind="stable")]
    objects, crowds = ordered[~ordered.crowd], ordered[ordered.crowd]
    n = matches.n_classes
    confusion = np.zeros((n + 1, n + 1), np.int64)
    mistakes: list[Mistake] = []
    ends = [np.searchsorted(each.images, np.arange(matches.n_images + 1)) for each in (above, objects, crowds)]
    for image in shown(range(matches.n_images), "errors", "images"):
        d, g, c = (np.arange(end[image], end[image + 1]) for end in ends)
        inside = iou_matrix(above.xyxy[d], crowds.xyxy[c], crowds.crowd[c]) >= IOU_THRESHOLD
        d = d[~(inside & (above.classes[d][:, None] == crowds.classes[c])).any(axis=1)]
        for truth, found, one in _of_image(image, above, objects, d, g):
            confusion[truth, found] += 1
            mistakes += [one] if one else []
    return Mistakes(threshold, above, objects, confusion, mistakes)


def _of_image(image: int, detections: Boxes, objects: Boxes, d: Ints, g: Ints) -> Iterator[tuple[int, int, Mistake | None]]:
    """(Class of the object, class of the detection, mistake) of each pair and of each box that is left; class -1 is none."""
    iou = iou_matrix(detections.xyxy[d], objects.xyxy[g])
    iou_of_class = np.where(detections.classes[d][:, None] == objects.classes[g], iou, 0)
    ours, theirs, scores = detections.classes[d].tolist(), objects.classes[g].tolist(), detections.scores[d].tolist()
    rest_d, rest_g = set(range(len(d))), set(range(len(g)))
    for i, j in greedy_pairs(iou_of_class, IOU_THRESHOLD, rest_d, rest_g):
        yield theirs[j], ours[i], None
    for i, j in greedy_pairs(iou, IOU_THRESHOLD, rest_d, rest_g):
        yield theirs[j], ours[i], Mistake("wrong class", image, int(d[i]), int(g[j]), scores[i], float(iou[i, j]))
    for i, j in greedy_pairs(iou_of_class, _SOME_OVERLAP, rest_d, rest_g):
        yield theirs[j], -1, Mistake("poorly placed", image, int(d[i]), int(g[j]), scores[i], float(iou[i, j]))
        yield -1, ours[i], None
    for i in rest_d:
        yield -1, ours[i], Mistake("false positive", image, int(d[i]), -1, scores[i], 0.0)
    for j in rest_g:
        yield theirs[j], -1, Mistake("miss", image, -1, int(g[j]), float(objects.areas[g[j]] / objects.areas[g].max()), 0.0)


def unsure_first(measured: Measurement, threshold: float) -> list[tuple[str, int, float]]:
    """What to label next: rows without labels, those with the most unsure detections first.

    Returns:
      (URI, number of unsure detections, lowest confidence of a detection that counts) of each image. Unsure is a confidence
      between half of the threshold and the middle between the threshold and 1.
    """
    listed = []
    for row in measured.pairing.unlabelled:
        unsure = int(((row.scores >= threshold / 2) & (row.scores <= (threshold + 1) / 2)).sum())
        shown = row.scores[row.scores >= threshold]
        listed.append((row.uri, unsure, float(shown.min()) if len(shown) else float("nan")))
    return sorted(listed, key=lambda one: (-one[1], one[2], one[0]))
