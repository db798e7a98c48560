"""Detections counted by class and confidence, with a bounded number of bins and classes."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import msgspec
import numpy as np

BINS = 20
OTHER_CLASSES = "(other classes)"
_MOST_CLASSES = 1000  # COCO has 80, Open Images 601
_MOST_COUNTS = 2 * BINS * _MOST_CLASSES
_SHOWN_CLASSES = 12

ClassConfidences = Counter[tuple[str, Annotated[int, msgspec.Meta(ge=0, lt=BINS)]]]  # by class name and `confidence_bins`


def confidence_bins(confidences: np.ndarray) -> list[int]:
    """The bin of each confidence; bin n begins at n / `BINS`. Confidences outside of 0..1 are in the first or last bin.

    >>> confidence_bins(np.array([0.0, 0.25, 1.0, np.nan, np.inf]))
    [0, 5, 19, 0, 19]
    """
    within = np.fmin(np.fmax(confidences, 0), 1)  # not a number counts as 0
    bins: list[int] = np.minimum(within * BINS, BINS - 1).astype(int).tolist()
    return bins


def by_class(counts: ClassConfidences) -> Counter[str]:
    """Detections by class name."""
    classes: Counter[str] = Counter()
    for (name, _), amount in counts.items():
        classes[name] += amount
    return classes


def bounded(counts: ClassConfidences) -> ClassConfidences:
    """Sums the rare classes as `OTHER_CLASSES` once there are more counts than 2,000 classes can have."""
    if len(counts) <= _MOST_COUNTS:
        return counts
    kept = dict(by_class(counts).most_common(_MOST_CLASSES))
    merged: ClassConfidences = Counter()
    for (name, number), amount in counts.items():
        merged[name if name in kept else OTHER_CLASSES, number] += amount
    return merged


def confidences_shown(counts: ClassConfidences) -> dict[str, Any]:
    """Detections by bin, of all classes and of the most frequent ones, for summary.json."""
    classes = by_class(counts)
    classes.pop(OTHER_CLASSES, None)
    rows = {name: [counts[name, number] for number in range(BINS)] for name, _ in classes.most_common(_SHOWN_CLASSES)}
    everything = [0] * BINS
    for (_, number), amount in counts.items():
        everything[number] += amount
    return {"all": everything, "by_class": rows}
