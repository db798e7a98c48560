"""Geometry of detection in NumPy: box formats, the transform from an image to a model's input and back, IoU and NMS.

Boxes are `(..., 4)` arrays. Edges are half-open and pixels have area: a box of the whole image is `0, 0, width, height`, and
the centre of the first pixel is at 0.5, 0.5.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image

if TYPE_CHECKING:  # pydantic is not for feeder processes
    from models.metadata import BoxFormat, LetterboxRule, Resize

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.integer]

_ROUNDS, _FEW_GROUPS = 8, 8  # of suppression; each round costs 0.03 ms, however many boxes are left


def boxes_to_xyxy(boxes: Any, box_format: BoxFormat) -> Any:
    """Convert `(..., 4)` boxes in `box_format` to left, top, right, bottom, which stay what they are; so do units."""
    if box_format == "xyxy":
        return boxes
    a, b, c, d = (boxes[..., n] for n in range(4))
    if box_format == "yxyx":
        edges = (b, a, d, c)
    elif box_format == "xywh":
        edges = (a, b, a + c, b + d)
    else:
        edges = (a - c / 2, b - d / 2, a + c / 2, b + d / 2)
    return np.stack(edges, axis=-1)


@dataclasses.dataclass(frozen=True, slots=True)
class InputTransform:
    """The place of an image in the model's input: `x_input = (x_image - left) * scale_x + offset_x`.

    Attributes:
      scale_x: Input pixels per image pixel, horizontally.
      scale_y: The same vertically.
      offset_x: Input pixels of padding left of the image.
      offset_y: Input pixels of padding above it.
      resized_wh: Size of the image inside the input, pixels.
      left: Pixels of the image left of what the input shows: 0, unless that is a tile.
      top: The same above it.
    """

    scale_x: float
    scale_y: float
    offset_x: int
    offset_y: int
    resized_wh: tuple[int, int]
    left: int = 0
    top: int = 0


def resize_plan(
    image_wh: tuple[int, int], input_hw: tuple[int, int], resize: Resize, letterbox_rule: LetterboxRule = "darknet"
) -> InputTransform:
    """Plans the resize of an image of `image_wh` pixels to a model's input of `input_hw` pixels.

    `none` keeps its size. `stretch` fills the input. `letterbox` keeps the aspect ratio, in whole pixels, by `letterbox_rule`:

    | rule            | size of the image in the input                                          | place    |
    |-----------------|-------------------------------------------------------------------------|----------|
    | darknet         | rounded down (`letterbox_image`)                                        | centre   |
    | ultralytics     | to nearest, halves to even (`LetterBox`: `round(size * r)`)             | centre   |
    | yolox           | down (`preproc`: `int(size * r)`)                                       | top left |
    | super_gradients | to nearest, in an input smaller by 4 (`DetectionLongestMaxSizeRescale`) | centre   |

    An odd pixel of padding goes to the right and the bottom, as with `round(padding / 2 - 0.1)` of Ultralytics.
    Boxes go back by whole pixels. The tools take the scale and offset before rounding, which is off by up to half an input pixel.
    """
    input_h, input_w = image_wh[::-1] if resize == "none" else input_hw
    resized_w, resized_h = (input_w, input_h) if resize != "letterbox" else _letterboxed_wh(image_wh, input_hw, letterbox_rule)
    return InputTransform(
        scale_x=resized_w / image_wh[0],
        scale_y=resized_h / image_wh[1],
        offset_x=0 if letterbox_rule == "yolox" else (input_w - resized_w) // 2,
        offset_y=0 if letterbox_rule == "yolox" else (input_h - resized_h) // 2,
        resized_wh=(resized_w, resized_h),
    )


def _letterboxed_wh(image_wh: tuple[int, int], input_hw: tuple[int, int], rule: LetterboxRule) -> tuple[int, int]:
    (image_w, image_h), (input_h, input_w) = image_wh, input_hw
    if rule == "darknet":
        w, h = image_w * input_h // image_h, image_h * input_w // image_w
    else:
        margin = 4 if rule == "super_gradients" else 0
        scale = min((input_h - margin) / image_h, (input_w - margin) / image_w)
        whole = int if rule == "yolox" else round
        w, h = whole(image_w * scale), whole(image_h * scale)
    return min(input_w, max(1, w)), min(input_h, max(1, h))


def fit_image(
    pixels: npt.NDArray[np.uint8],
    transform: InputTransform,
    input_hw: tuple[int, int],
    letterbox_value: int = 128,
    out: npt.NDArray[np.uint8] | None = None,
    *,
    antialias: bool = False,
) -> npt.NDArray[np.uint8]:
    """Resize `(h, w, 3) uint8` pixels bilinearly, and pad them to `input_hw`; into `out`, if given. Pillow antialiases."""
    fitted = np.empty((*input_hw, 3), np.uint8) if out is None else out
    (w, h), x, y = transform.resized_wh, transform.offset_x, transform.offset_y
    if (h, w) != input_hw:
        fitted[:] = letterbox_value
    if antialias:
        fitted[y : y + h, x : x + w] = np.asarray(Image.fromarray(pixels).resize((w, h), Image.Resampling.BILINEAR))
        return fitted
    cv2.resize(pixels, (w, h), dst=fitted[y : y + h, x : x + w], interpolation=cv2.INTER_LINEAR)
    return fitted


def iou_matrix(a_xyxy: Floats, b_xyxy: Floats, b_crowd: npt.NDArray[np.bool_] | None = None) -> Floats:
    """IoU of each of `(N, 4)` boxes with each of `(M, 4)`: `(N, M)`, 0 if both are empty.

    With a box that `b_crowd`, `(M,)`, marks as a crowd, it is the share of the other box inside it, as in COCO.
    """
    (a_left, a_top, a_right, a_bottom), (b_left, b_top, b_right, b_bottom) = a_xyxy.T[..., None], b_xyxy.T
    width = np.maximum(np.minimum(a_right, b_right) - np.maximum(a_left, b_left), 0)
    intersection = width * np.maximum(np.minimum(a_bottom, b_bottom) - np.maximum(a_top, b_top), 0)
    a_area, b_area = (a_right - a_left) * (a_bottom - a_top), (b_right - b_left) * (b_bottom - b_top)
    whole = a_area + b_area - intersection
    if b_crowd is not None:
        whole = np.where(b_crowd, a_area, whole)
    return np.asarray(np.divide(intersection, whole, out=np.zeros_like(intersection), where=whole > 0))


def greedy_pairs(iou: Floats, least: float, free_rows: set[int], free_columns: set[int]) -> list[tuple[int, int]]:
    """Pairs (row, column) of an IoU of at least `least`, by descending IoU, each row and column once.

    Args:
      iou: `(N, M)`.
      least: Above 0.
      free_rows: Rows that may be taken; those of the pairs are removed.
      free_columns: The same for columns.
    """
    candidates = np.argwhere(iou >= least)
    order = np.argsort(-iou[candidates[:, 0], candidates[:, 1]], kind="stable")
    pairs = []
    for i, j in candidates[order].tolist():
        if i in free_rows and j in free_columns:
            free_rows.remove(i)
            free_columns.remove(j)
            pairs.append((i, j))
    return pairs


def descending(groups: Ints, scores: Floats) -> npt.NDArray[np.intp]:
    """The order by ascending group, and within it by descending score; of equal ones the first stays the first.

    Complex numbers are sorted by their real parts first, in half the time that `np.lexsort` takes.

    Args:
      groups: `(N,)`, numbers within 53 bits.
      scores: `(N,)`.
    """
    return np.argsort(groups - 1j * scores, kind="stable")


def nms(boxes_xyxy: Floats, scores: Floats, groups: Ints, iou_threshold: float) -> npt.NDArray[np.bool_]:
    """Greedy non-maximum suppression in all groups at once: `(N,)`, whether a box stays.

    A box is dropped if its IoU with a better box of its group that stays is *above* `iou_threshold`; of two with the same score
    the first one is better. A box without area has no rivals.

    Each round keeps the best box of each group and drops its rivals. What is left after a few rounds, or of a few groups, goes to
    OpenCV. Its `NMSBoxes` takes one group at a time: 60 boxes around ten objects take 0.01 CPU-ms an image in batches of 32 here,
    and 0.10 there. Its `NMSBoxesBatched` compares boxes of different groups, too.

    Args:
      boxes_xyxy: `(N, 4)`.
      scores: `(N,)` confidences.
      groups: `(N,)`: which boxes are rivals, such as those of one image and class.
      iou_threshold: 0..1.
    """
    order = descending(groups, scores)
    edges = np.empty((5, len(order)), boxes_xyxy.dtype)  # and the area
    edges[:4] = boxes_xyxy.take(order, axis=0).T
    sizes = np.maximum(edges[2:4] - edges[:2], 0)
    edges[4] = sizes[0] * sizes[1]
    ordered, stays = groups.take(order), edges[4] == 0
    left = np.flatnonzero(~stays)
    for turn in itertools.count():
        of = ordered.take(left)
        is_best = np.ones(len(left) + 1, np.bool_)  # the last one is the end of the last group
        is_best[1:-1] = of[1:] != of[:-1]
        bounds = np.flatnonzero(is_best)
        best = left.take(bounds[:-1])
        if len(best) < _FEW_GROUPS or turn == _ROUNDS:
            break
        stays[best] = True
        others, rivals = left[~is_best[:-1]], np.repeat(best, bounds[1:] - bounds[:-1] - 1)
        a, b = edges.take(others, axis=1), edges.take(rivals, axis=1)
        width, height = np.maximum(np.minimum(a[2:4], b[2:4]) - np.maximum(a[:2], b[:2]), 0)
        common = width * height
        left = others[common <= iou_threshold * (a[4] + b[4] - common)]
    for group in np.split(left, bounds[1:-1]) if len(left) else ():
        rects = np.concatenate([edges[:2, group], sizes[:, group]]).T.tolist()
        stays[group[np.array(cv2.dnn.NMSBoxes(rects, [*range(len(group), 0, -1)], 0.0, iou_threshold))]] = True
    found = np.empty(len(order), np.bool_)
    found[order] = stays
    return found


def nmm(
    boxes_xyxy: Floats, scores: Floats, class_ids: Ints, threshold: float, max_detections: int
) -> tuple[npt.NDArray[np.intp], Floats]:
    """Greedy non-maximum merging: the indices to keep, confidence descending, ties in the given order, and their grown boxes.

    A kept box grows around the less sure boxes of its class that share at least `threshold` of the smaller of both with it (IoS),
    which are then gone: parts of an object become one. As GREEDYNMM of SAHI. A box without area has no rivals.

    Args:
      boxes_xyxy: `(N, 4)`.
      scores: `(N,)` confidences.
      class_ids: `(N,)`.
      threshold: 0..1.
      max_detections: Keep at most so many, over all classes.
    """
    areas = np.prod(boxes_xyxy[:, 2:] - boxes_xyxy[:, :2], axis=1)
    left: npt.NDArray[np.intp] = np.argsort(-scores, kind="stable")
    kept: list[np.intp] = []
    grown: list[Floats] = []
    while len(left) and len(kept) < max_detections:
        first, others = left[0], left[1:]
        corners = (
            np.maximum(boxes_xyxy[others, :2], boxes_xyxy[first, :2]),
            np.minimum(boxes_xyxy[others, 2:], boxes_xyxy[first, 2:]),
        )
        shared = np.prod(np.maximum(corners[1] - corners[0], 0), axis=1)
        smaller = np.minimum(areas[others], areas[first])
        same = (class_ids[others] == class_ids[first]) & (smaller > 0) & (shared >= threshold * smaller)
        group = boxes_xyxy[np.append(others[same], first)]
        kept.append(first)
        grown.append(np.concatenate([group[:, :2].min(axis=0), group[:, 2:].max(axis=0)]))
        left = others[~same]
    return np.array(kept, np.intp), np.array(grown, boxes_xyxy.dtype).reshape(-1, 4)
