"""Thumbnails of a few images for the report."""

from __future__ import annotations

import cv2
import numpy as np

_JPEG_QUALITY = 85


def make_thumbnail(pixels_rgb_upright: np.ndarray, max_side: int = 800) -> bytes:
    """Shrinks an image so that its longer side has at most `max_side` pixels; never enlarges it.

    Args:
      pixels_rgb_upright: `(H, W, 3) uint8`, RGB, EXIF orientation applied.
      max_side: Pixels.

    Returns:
      A JPEG.

    Raises:
      ValueError: The array is not an RGB image.
    """
    shape, dtype = pixels_rgb_upright.shape, pixels_rgb_upright.dtype
    if len(shape) != 3 or shape[2] != 3 or 0 in shape or dtype != np.uint8:
        raise ValueError(f"expected pixels (H, W, 3) uint8, got {shape} {dtype}")
    height, width = shape[:2]
    scale = min(1.0, max_side / max(height, width))
    if scale < 1.0:
        size_wh = (max(1, round(width * scale)), max(1, round(height * scale)))
        averaging = cv2.INTER_LINEAR if scale >= 0.5 else cv2.INTER_AREA  # linear is enough there, and three times as fast
        pixels_rgb_upright = cv2.resize(pixels_rgb_upright, size_wh, interpolation=averaging)
    bgr = cv2.cvtColor(pixels_rgb_upright, cv2.COLOR_RGB2BGR)
    return bytes(cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])[1])
