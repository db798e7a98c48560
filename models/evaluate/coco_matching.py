"""COCO's matching of detections with objects, once for each image; every figure and each bootstrap resample is read from it.

The rules are those of pycocotools' `COCOeval` for boxes. Libraries give only the figures: faster-coco-eval keeps its matches in
C++, and pycocotools needs minutes for them. https://cocodataset.org/#detection-eval
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from models.base.progress import shown
from models.geometry import iou_matrix

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
AREAS = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
MOST_DETECTIONS = 100  # of a class in an image
_EPSILON = np.spacing(1)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False)
class Boxes:
    """Detections or objects of all images.

    Attributes:
      images: `(N,)` indices of images.
      classes: `(N,)` indices of classes.
      xyxy: `(N, 4)` pixels.
      scores: `(N,)` confidences; 1 for an object.
      areas: `(N,)` square pixels.
      crowd: `(N,)`: an object that counts neither as found nor as missed.
    """

    images: Ints
    classes: Ints
    xyxy: Floats
    scores: Floats
    areas: Floats
    crowd: Bools

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, chosen: Ints | Bools | slice) -> Boxes:
        return Boxes(**{field.name: getattr(self, field.name)[chosen] for field in dataclasses.fields(self)})


@dataclasses.dataclass(frozen=True, eq=False)
class Matches:
    """Detections by class, then score descending, and whether they hit an object.

    Attributes:
      detections: `(D)` sorted detections.
      rank: `(D,)` place among the detections of its class in its image, from 0.
      hit: `(areas, IoU thresholds, D)`: whether it found an object that counts.
      ignored: The same shape: whether it does not count.
      objects: `(G)` objects.
      counts: `(areas, G)` whether the object counts.
      n_classes: Number of classes.
      n_images: Number of images.
    """

    detections: Boxes
    rank: Ints
    hit: Bools
    ignored: Bools
    objects: Boxes
    counts: Bools
    n_classes: int
    n_images: int

    def curves(self, area: int = 0, weights: Floats | None = None, most: int = MOST_DETECTIONS) -> tuple[Floats, Floats]:
        """Interpolated precision and final recall.

        Args:
          area: Index in `AREAS`.
          weights: `(n_images,)` how often each image counts, whole numbers; default: once.
          most: Detections of a class in an image that count.

        Returns:
          Precision `(IoU thresholds, classes, RECALLS)` and recall `(IoU thresholds, classes)`; NaN for a class without objects.
        """
        by_image = np.ones(self.n_images) if weights is None else weights
        weight = by_image[self.detections.images] * (self.rank < most)
        counted = self.counts[area]
        objects = np.bincount(self.objects.classes[counted], by_image[self.objects.images[counted]], minlength=self.n_classes)
        needed = _needed(objects.astype(np.float64))
        results = [self._curve(area, t, weight, needed) for t in range(len(IOU_THRESHOLDS))]
        absent = objects == 0
        precision, found = (np.stack(each) for each in zip(*results, strict=True))
        precision[:, absent] = np.nan
        return precision, np.divide(found, objects, out=np.full_like(found, np.nan), where=~absent)

    def _curve(self, area: int, t: int, weight: Floats, needed: Floats) -> tuple[Floats, Floats]:
        """Precision at `RECALLS` `(classes, 101)` and objects found `(classes,)`; between two hits precision only falls."""
        at, classes, starts, firsts, all_count = self._hits(area, t)
        total = np.concatenate([[0.0], np.cumsum(weight if all_count else weight * ~self.ignored[area, t])])
        hits = np.concatenate([[0.0], np.cumsum(weight[at])])
        before = hits[starts[:-1]]
        precision = (hits[1:] - before[classes]) / (total[at + 1] - total[firsts[classes]] + _EPSILON)
        apart = 2.0 * (self.n_classes - classes)  # keeps the running maximum of one class from the class before it
        highest = np.maximum.accumulate((precision + apart)[::-1])[::-1] - apart
        place = np.searchsorted(hits[1:], needed + before[:, None])
        reached = place < starts[1:, None]
        highest = np.append(highest, 0.0)
        return np.where(reached, highest[np.where(reached, place, -1)], 0.0), hits[starts[1:]] - before

    @functools.lru_cache(maxsize=64)  # noqa: B019  a measurement has two of these objects at most
    def _hits(self, area: int, t: int) -> tuple[Ints, Ints, Ints, Ints, bool]:
        """What does not depend on the weights: places and classes of the hits, and where each class begins."""
        at = np.flatnonzero(self.hit[area, t])
        firsts = np.searchsorted(self.detections.classes, np.arange(self.n_classes + 1))
        return at, self.detections.classes[at], np.searchsorted(at, firsts), firsts, not self.ignored[area, t].any()


def best_labels(detections: Boxes) -> Boxes:
    """The most confident label of each box, by image."""
    ordered = detections[np.lexsort((-detections.scores, detections.images))]
    _, first = np.unique(np.column_stack([ordered.images, ordered.xyxy]), axis=0, return_index=True)
    return ordered[np.sort(first)]


def match_boxes(detections: Boxes, objects: Boxes, n_classes: int, n_images: int) -> Matches:
    """Matches the detections of each image with its objects, class by class.

    Each detection, most confident first, takes the free object of the highest IoU, at each IoU threshold.
    """
    order = np.lexsort((-detections.scores, detections.images, detections.classes))
    detections, objects = detections[order], objects[np.lexsort((objects.images, objects.classes))]
    keys, their_keys = (each.classes * n_images + each.images for each in (detections, objects))
    rank = np.arange(len(keys)) - np.searchsorted(keys, keys)
    low, high = np.array(list(AREAS.values())).T[:, :, None]
    counts = ~objects.crowd & (objects.areas >= low) & (objects.areas <= high)
    hit = np.zeros((len(AREAS), len(IOU_THRESHOLDS), len(keys)), bool)
    # an unmatched detection of another size does not count
    ignored = np.repeat(((detections.areas < low) | (detections.areas > high))[:, None], len(IOU_THRESHOLDS), axis=1)
    common = np.intersect1d(keys, their_keys)
    places = [np.searchsorted(each, ends) for each in (keys, their_keys) for ends in (common, common + 1)]
    for d0, d1, g0, g1 in shown(np.stack(places, axis=1).tolist(), "matching", "groups"):
        top = slice(d0, min(d1, d0 + MOST_DETECTIONS))
        _match_group(detections[top], objects[slice(g0, g1)], counts[:, g0:g1], hit[:, :, top], ignored[:, :, top])
    keep = rank < MOST_DETECTIONS
    order = np.lexsort((-detections.scores[keep], detections.classes[keep]))  # stable: equal scores stay in the order of images
    hit, ignored = hit[:, :, keep][:, :, order], ignored[:, :, keep][:, :, order]
    return Matches(detections[keep][order], rank[keep][order], hit & ~ignored, ignored, objects, counts, n_classes, n_images)


def _match_group(detections: Boxes, objects: Boxes, counts: Bools, hit: Bools, ignored: Bools) -> None:
    """Fills `hit` and `ignored`, `(areas, IoU thresholds, D)`, of one class in one image."""
    iou = iou_matrix(detections.xyxy, objects.xyxy, objects.crowd)
    free = np.ones((len(AREAS), len(IOU_THRESHOLDS), len(objects)), bool)
    bonus = np.where(counts, 2.0, 0.0)[:, None, :]  # an object that counts comes before one that does not
    thresholds = np.minimum(IOU_THRESHOLDS, 1 - 1e-10)[:, None]
    for d in np.flatnonzero(iou.max(axis=1) >= IOU_THRESHOLDS[0]).tolist():
        value = np.where((iou[d] >= thresholds) & free, iou[d] + bonus, -1.0)[..., ::-1]
        best = value.argmax(axis=-1)[..., None]  # of the reversed row: the last of equal ones, as in pycocotools
        found = np.take_along_axis(value, best, -1)[..., 0] >= 0
        best = len(objects) - 1 - best
        of_no_count = ~np.take_along_axis(np.broadcast_to(counts[:, None], free.shape), best, -1)[..., 0]
        hit[:, :, d] = found
        ignored[:, :, d] = np.where(found, of_no_count, ignored[:, :, d])
        taken = found & ~objects.crowd[best[..., 0]]  # a crowd may be found several times
        np.put_along_axis(free, best, np.take_along_axis(free, best, -1) & ~taken[..., None], -1)


def _needed(objects: Floats) -> Floats:
    """The fewest hits that reach each of `RECALLS`, `(classes, 101)`, compared as pycocotools does: as floats, hits / objects."""
    most = np.maximum(objects, 1)[:, None]
    needed = np.ceil(RECALLS * most)
    needed -= (needed - 1) / most >= RECALLS
    needed += needed / most < RECALLS
    return np.maximum(needed, 1)
