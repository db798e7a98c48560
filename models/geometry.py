"""Geometry of detection in NumPy: box formats, the transform from an image to a model's input and back, IoU and NMS.

Boxes are `(..., 4)` arrays. Edges are half-open and pixels have area: a box of the whole image is `0, 0, width, height`, and
the centre of the first pixel is at 0.5, 0.5.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image

if TYPE_CHECKING:  # pydantic is not for feeder processes
    from models.metadata import BoxFormat, LetterboxRule, Resize

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.integer]

_FAR = 1e6  # pixels; boxes that end beyond are compared up to there, so that their size leaves the others their precision


def boxes_to_xyxy(boxes: Any, box_format: BoxFormat, xp: Any = np) -> Any:
    """Convert `(..., 4)` boxes in `box_format` to left, top, right, bottom; units stay as they are.

    Args:
      boxes: An array, or a tensor.
      box_format: Order of their numbers.
      xp: NumPy, or for a tensor `tf.experimental.numpy`.
    """
    a, b, c, d = (boxes[..., n] for n in range(4))
    if box_format == "xyxy":
        edges = (a, b, c, d)
    elif box_format == "yxyx":
        edges = (b, a, d, c)
    elif box_format == "xywh":
        edges = (a, b, a + c, b + d)
    else:
        edges = (a - c / 2, b - d / 2, a + c / 2, b + d / 2)
    return xp.stack(edges, axis=-1)


@dataclasses.dataclass(frozen=True, slots=True)
class InputTransform:
    """The place of an image in the model's input: `x_input = x_image * scale_x + offset_x`.

    Attributes:
      scale_x: Input pixels per image pixel, horizontally.
      scale_y: The same vertically.
      offset_x: Input pixels of padding left of the image.
      offset_y: Input pixels of padding above it.
      resized_wh: Size of the image inside the input, pixels.
    """

    scale_x: float
    scale_y: float
    offset_x: int
    offset_y: int
    resized_wh: tuple[int, int]


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


def nms(boxes_xyxy: Floats, scores: Floats, class_ids: Ints, iou_threshold: float, max_detections: int) -> npt.NDArray[np.intp]:
    """Greedy non-maximum suppression: the indices to keep, confidence descending, ties in the given order.

    A box is dropped if its IoU with a kept box of its class is *above* `iou_threshold`. A box without area has no rivals.
    OpenCV compares the boxes, those of each class in a place of its own: its own `NMSBoxesBatched` lets classes touch where
    coordinates are negative. Its IoU is float32.

    Args:
      boxes_xyxy: `(N, 4)`.
      scores: `(N,)` confidences.
      class_ids: `(N,)`.
      iou_threshold: 0..1.
      max_detections: Keep at most so many, over all classes.
    """
    if not len(scores):
        return np.zeros(0, np.intp)
    order: npt.NDArray[np.intp] = np.argsort(-scores, kind="stable")
    edges = np.clip(boxes_xyxy[order], -_FAR, _FAR)
    rects = np.concatenate([edges[:, :2], edges[:, 2:] - edges[:, :2]], axis=1)
    rects[:, 0] += class_ids[order] * (np.ptp(edges) + 1)
    flat = (rects[:, 2:] <= 0).any(axis=1)
    if not flat.any():
        kept = cv2.dnn.NMSBoxes(rects.tolist(), [*range(len(rects), 0, -1)], 0.0, iou_threshold)
        return order[np.array(kept[:max_detections], np.intp)]
    solid = np.flatnonzero(~flat)
    among = cv2.dnn.NMSBoxes(rects[solid].tolist(), [*range(len(solid), 0, -1)], 0.0, iou_threshold) if solid.size else ()
    found: npt.NDArray[np.intp] = np.sort(np.concatenate([solid[np.array(among, np.intp)], np.flatnonzero(flat)]))
    return order[found[:max_detections]]
