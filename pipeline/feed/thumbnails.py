"""Thumbnails of a few images for the report."""

from __future__ import annotations

import cv2

from pipeline.feed.decode import DecodedImage, decode_image
from pipeline.feed.decoders import Room, any_room
from pipeline.feed.formats import Size

_JPEG_QUALITY = 85
_MOST_SIDE = 800


def make_thumbnail(content: bytes, max_pixels: float, room: Room = any_room) -> bytes:
    """Decodes an image, and shrinks it so that its longer side has at most 800 pixels; never enlarges it.

    Args:
      content: The image file's bytes.
      max_pixels: See `decode_image`.
      room: See `decode_image`.

    Returns:
      A JPEG of the upright image.

    Raises:
      ImageError: The image cannot be decoded.
    """
    return _as_jpeg(decode_image(content, max_pixels, _thumbnail_wh, margin=1.0, room=room))


def thumbnail_of(decoded: DecodedImage) -> bytes:
    """As `make_thumbnail`, of pixels that are there; empty if the image was decoded at a smaller scale than a thumbnail needs."""
    (width, height), needed = decoded.pixels.shape[1::-1], _thumbnail_wh(decoded.image_wh)
    return _as_jpeg(decoded) if width >= needed[0] and height >= needed[1] else b""


def _thumbnail_wh(image_wh: Size) -> Size:
    scale = min(1.0, _MOST_SIDE / max(image_wh))
    return max(1, round(image_wh[0] * scale)), max(1, round(image_wh[1] * scale))


def _as_jpeg(decoded: DecodedImage) -> bytes:
    pixels, thumbnail_wh = decoded.pixels, _thumbnail_wh(decoded.image_wh)
    if thumbnail_wh != pixels.shape[1::-1]:
        averaging = cv2.INTER_LINEAR if 2 * thumbnail_wh[0] >= pixels.shape[1] else cv2.INTER_AREA  # linear: three times as fast
        pixels = cv2.resize(pixels, thumbnail_wh, interpolation=averaging)
    bgr = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
    return bytes(cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])[1])
