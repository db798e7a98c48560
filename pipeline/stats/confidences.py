"""`Confidences`: a histogram of confidences by class, with a bounded number of bins and classes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import numpy as np

BINS = 20
OTHER_CLASSES = "(other classes)"
_MOST_CLASSES = 100  # the report shows twelve of them
_SHOWN_CLASSES = 12


def bounded(classes: Counter[str], most: int = 5000) -> Counter[str]:
    """Sums the rare classes as `OTHER_CLASSES`, once there are more than twice as many as wanted.

    Args:
      classes: Detections by class name; COCO has 80 classes, Open Images 601, LVIS 1,203.
      most: Frequent classes that are kept.
    """
    if len(classes) <= 2 * most:
        return classes
    kept = Counter(dict(Counter({**classes, OTHER_CLASSES: 0}).most_common(most)))
    kept[OTHER_CLASSES] = classes.total() - kept.total()
    return kept


_Bins = Counter[Annotated[int, msgspec.Meta(ge=0, lt=BINS)]]


@dataclasses.dataclass
class Confidences:
    """Detections by class and confidence; the rare ones of more than 200 classes are counted as `OTHER_CLASSES`.

    Attributes:
      by_class: Detections by class name and bin; bin n of `BINS` begins at confidence n / `BINS`.
    """

    by_class: dict[str, _Bins] = dataclasses.field(default_factory=dict)

    def add(self, class_names: Iterable[str], confidences: np.ndarray) -> None:
        """Counts detections.

        Args:
          class_names: N names.
          confidences: `(N,) float32` in 0..1; others count in the first or last bin.
        """
        within = np.fmin(np.fmax(confidences, 0), 1)  # not a number counts as 0
        bins = np.minimum(within * BINS, BINS - 1).astype(int).tolist()
        for (name, number), count in Counter(zip(class_names, bins, strict=True)).items():
            self.by_class.setdefault(name, Counter())[number] += count
        self._bound()

    def __add__(self, other: Confidences) -> Confidences:
        """Both; shares nothing with them."""
        both = Confidences(_gathered([*self.by_class.items(), *other.by_class.items()]))
        both._bound()
        return both

    def as_dict(self) -> dict[str, Any]:
        """Detections by bin, of all classes and of the most frequent ones, for summary.json."""
        named = Counter({name: bins.total() for name, bins in self.by_class.items() if name != OTHER_CLASSES})
        return {
            "all": _row(sum(self.by_class.values(), Counter())),
            "by_class": {name: _row(self.by_class[name]) for name, _ in named.most_common(_SHOWN_CLASSES)},
        }

    def _bound(self) -> None:
        if len(self.by_class) > 2 * _MOST_CLASSES:
            kept = bounded(Counter({name: bins.total() for name, bins in self.by_class.items()}), _MOST_CLASSES)
            self.by_class = _gathered((name if name in kept else OTHER_CLASSES, bins) for name, bins in self.by_class.items())


def _gathered(parts: Iterable[tuple[str, _Bins]]) -> dict[str, _Bins]:
    sums: dict[str, _Bins] = {}
    for name, bins in parts:
        sums[name] = sums.get(name, Counter()) + bins
    return sums


def _row(bins: _Bins) -> list[int]:
    return [bins[number] for number in range(BINS)]
