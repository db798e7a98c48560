"""Handwritten digits as ink: scikit-learn's 8x8 images, split by sample, rendered at any size, slant and stroke width.

The data consists of 14 forms of about 130 digits, one after the other. Each split ends with a form, so no image and no form is in
two splits. (The data's notes name 13 people: one may have filled in two forms.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "validation", "test"]
SPLITS: dict[Split, tuple[int, int]] = {"train": (0, 1287), "validation": (1287, 1415), "test": (1415, 1797)}

# 12x12 source pixels (the 8x8 image with a margin of 2), each as 8x8 pixels, so that a warp sees smooth strokes
_MARGIN = 2
_UPSCALE = 8


@dataclass(frozen=True, slots=True)
class DigitImages:
    """The digit images of one split.

    Attributes:
        images: (N, 8, 8) float32 in 0..1, 1 is ink.
        labels: (N,) int64 in 0..9.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InkStyle:
    """Size, slant and pen; the digits of one number share them.

    Attributes:
        height_px: height of the 8 source rows, in pixels of the scene.
        aspect: width over height relative to the source.
        rotation_deg: rotation, counter-clockwise on the screen.
        shear: horizontal slant, as a share of the height.
        threshold: level of the source at which a stroke ends; lower is a thicker pen.
        softness: half the width of the stroke's edge, in the same unit.
        wobble_px: standard deviation of the elastic distortion, in source pixels.
    """

    height_px: float
    aspect: float
    rotation_deg: float
    shear: float
    threshold: float
    softness: float
    wobble_px: float


@cache
def load_digit_images(split: Split) -> DigitImages:
    """The digits of a split; needs scikit-learn (a development dependency)."""
    from sklearn.datasets import load_digits

    first, end = SPLITS[split]
    bunch = load_digits()
    return DigitImages((bunch.images[first:end] / 16.0).astype(np.float32), bunch.target[first:end].astype(np.int64))


def render_digit(source: NDArray[np.float32], style: InkStyle, rng: np.random.Generator) -> NDArray[np.float32]:
    """Draws one digit.

    Args:
        source: (8, 8) float32 in 0..1.
        style: size, slant and pen.
        rng: random numbers of the elastic distortion.

    Returns:
        (h, w) float32 alpha in 0..1, at least 1x1. It is cropped to the pixels that are at least half covered, so that the
        extent of the array is the ground truth box.
    """
    padded = np.pad(source, _MARGIN)
    fine = np.asarray(cv2.resize(padded, None, fx=_UPSCALE, fy=_UPSCALE, interpolation=cv2.INTER_CUBIC), np.float32)
    warped = cv2.warpAffine(_wobble(fine, style.wobble_px, rng), *_affine(style, fine.shape[0]), flags=cv2.INTER_LINEAR)
    # The ramp below is 0.5 at the threshold, so these pixels are at least half covered.
    left, top, width, height = cv2.boundingRect((warped >= style.threshold).astype(np.uint8))
    if not width:
        return np.zeros((1, 1), np.float32)
    ink = warped[top : top + height, left : left + width]
    ramp = np.clip((ink - style.threshold) / (2 * style.softness) + 0.5, 0.0, 1.0)
    return np.asarray(ramp * ramp * (3 - 2 * ramp), np.float32)


def _wobble(fine: NDArray[np.float32], wobble_px: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """Elastic distortion (Simard et al., 2003)."""
    side = fine.shape[0]
    coarse = rng.normal(0.0, wobble_px * _UPSCALE, (4, 4, 2)).astype(np.float32)
    shift = cv2.resize(coarse, (side, side), interpolation=cv2.INTER_CUBIC)
    grid = np.arange(side, dtype=np.float32)
    return np.asarray(cv2.remap(fine, grid[None, :] + shift[..., 0], grid[:, None] + shift[..., 1], cv2.INTER_LINEAR), np.float32)


def _affine(style: InkStyle, side: int) -> tuple[NDArray[np.float64], tuple[int, int]]:
    """The matrix from the upscaled source (`side` pixels square) to a patch that holds any rotation of it; the patch's size."""
    scale = style.height_px / (8 * _UPSCALE)
    angle = np.deg2rad(style.rotation_deg)
    rotation = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    slant = np.array([[style.aspect, -style.shear], [0.0, 1.0]])
    linear = scale * rotation @ slant
    patch = int(np.ceil(side * scale * (1.2 + abs(style.shear))))
    offset = np.array([patch / 2, patch / 2]) - linear @ np.array([side / 2, side / 2])
    return np.hstack([linear, offset[:, None]]), (patch, patch)
