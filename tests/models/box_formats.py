"""Boxes of all formats for tests: the inverse of what the pipeline needs."""

from __future__ import annotations

import numpy as np

from models.geometry import Floats, InputTransform
from models.metadata import BoxFormat


def boxes_from_xyxy(boxes_xyxy: Floats, box_format: BoxFormat) -> Floats:
    """Convert `(..., 4)` boxes of left, top, right, bottom to `box_format`; the inverse of `boxes_to_xyxy`."""
    left, top, right, bottom = np.moveaxis(boxes_xyxy, -1, 0)
    if box_format == "xyxy":
        numbers = (left, top, right, bottom)
    elif box_format == "yxyx":
        numbers = (top, left, bottom, right)
    elif box_format == "xywh":
        numbers = (left, top, right - left, bottom - top)
    else:
        numbers = ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)
    return np.stack(numbers, axis=-1)


def to_model(boxes_xyxy: Floats, transform: InputTransform) -> Floats:
    """Map `(..., 4)` boxes from pixels of the image to pixels of the model's input; the inverse of `to_original`."""
    scale = np.array([transform.scale_x, transform.scale_y] * 2)
    return np.asarray(boxes_xyxy * scale + np.array([transform.offset_x, transform.offset_y] * 2))


def to_original(boxes_xyxy: Floats, transform: InputTransform) -> Floats:
    """Map `(..., 4)` boxes from pixels of the model's input to pixels of the image."""
    offset = np.array([transform.offset_x, transform.offset_y] * 2, np.float64)
    return np.asarray((boxes_xyxy - offset) / np.array([transform.scale_x, transform.scale_y] * 2))
