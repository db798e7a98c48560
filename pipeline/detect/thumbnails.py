"""Thumbnails of a few images for the report."""

from __future__ import annotations

import cv2

from pipeline.detect.decode import decode_image
from pipeline.detect.headers.header import Size

_JPEG_QUALITY = 85


def make_thumbnail(content: bytes, max_pixels: float, max_side: int = 800) -> bytes:
    """Decodes an image and shrinks it so that its longer side has at most `max_side` pixels; never enlarges it.

    Args:
      content: The image file's bytes.
      max_pixels: See `decode_image`.
      max_side: Pixels.

    Returns:
      A JPEG of the upright image.

    Raises:
      ImageError: The image cannot be decoded.
    """

    def shrunk_wh(image_wh: Size) -> Size:
        scale = min(1.0, max_side / max(image_wh))
        return max(1, round(image_wh[0] * scale)), max(1, round(image_wh[1] * scale))

    decoded = decode_image(content, max_pixels, shrunk_wh)
    pixels, thumbnail_wh = decoded.pixels, shrunk_wh(decoded.image_wh)
    if thumbnail_wh != decoded.image_wh:
        averaging = cv2.INTER_LINEAR if 2 * thumbnail_wh[0] >= pixels.shape[1] else cv2.INTER_AREA  # linear: three times as fast
        pixels = cv2.resize(pixels, thumbnail_wh, interpolation=averaging)
    bgr = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
    return bytes(cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])[1])
