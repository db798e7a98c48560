"""Calls of OpenCV and Pillow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import cv2
import numpy as np
from PIL import AvifImagePlugin, Image

from pipeline.feed.readable_formats import Size

cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # the dead letter has the error
cv2.setNumThreads(1)  # images are decoded in parallel already
AvifImagePlugin.DEFAULT_MAX_THREADS = 1

_ROWS = 64
Room = Callable[[float, Size, float], contextlib.AbstractContextManager[None]]
"""Surrounds the decoding of an image that takes so many bytes, has this size, and may take so many seconds of CPU.

Raises `ImageError` where there is no room.
"""


def any_room(_needed_bytes: float, _wh: Size, _seconds: float) -> contextlib.AbstractContextManager[None]:
    """Room for any image."""
    return contextlib.nullcontext()


def opencv_pixels(content: bytes, flag: int = cv2.IMREAD_COLOR_RGB) -> np.ndarray | None:
    """Decodes with OpenCV; does not apply a JPEG's or PNG's orientation.

    Returns:
      `(h, w, 3)` RGB, `uint8` unless the flag has `IMREAD_ANYDEPTH`; None if OpenCV cannot decode it.

    Raises:
      MemoryError: There is not enough memory for the pixels.
    """
    try:
        return cv2.imdecode(np.frombuffer(content, np.uint8), flag | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as err:
        if err.code == cv2.Error.StsNoMem:
            raise MemoryError(str(err)) from err
        return None


def opencv_8_bit(name: str, content: bytes) -> np.ndarray | None:
    """As `opencv_pixels`, scaled to 8 bits whatever a format has."""
    if name != "TIFF":
        return opencv_pixels(content)
    pixels = opencv_pixels(content, cv2.IMREAD_COLOR_BGR | cv2.IMREAD_ANYDEPTH)  # as RGB, OpenCV 4.14 makes 16 bits black
    if pixels is None:
        return None
    return (pixels if pixels.dtype == np.uint8 else to_8_bit(pixels))[..., ::-1]


def pillow_pixels(image: Image.Image) -> np.ndarray:
    """The pixels of an image opened by Pillow, `(h, w, 3) uint8` RGB; raises Pillow's errors."""
    if image.mode.startswith(("I", "F")):  # Pillow would clip these to 8 bits, not scale
        return to_8_bit(np.asarray(image), any_range=image.format == "TIFF")
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def turn_upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Applies an EXIF orientation (1 to 8, as in Exif 2.3, section 4.6.4) with a view or one copy."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    rows, columns = (-1 if orientation in flipped else 1 for flipped in ((3, 4, 7, 8), (2, 3, 6, 7)))
    return np.ascontiguousarray(pixels[::rows, ::columns])


def to_8_bit(values: np.ndarray, *, any_range: bool = True) -> np.ndarray:
    """Scales pixels of more than 8 bits, `(h, w)` or `(h, w, 3)`, to `(h, w, 3) uint8`.

    Args:
      values: Integers, or floats, whose largest value becomes 255.
      any_range: Whether integers may be of fewer bits than they are stored in, as those of microscopes and depth cameras are: the
        narrowest usual width that holds them is taken. Else they have 16 bits.
    """
    most = max(float(np.fmax.reduce(values, axis=None)), 1e-9)  # not of pixels without a value (NaN)
    widths = (8, 10, 12, 14, 16) if any_range else (16,)
    top = most if values.dtype.kind == "f" else next((2.0**bits - 1 for bits in widths if most < 2**bits), most)
    scaled = np.empty(values.shape, np.uint8)
    for row in range(0, len(values), _ROWS):  # all at once would take 12 bytes more a pixel
        scaled[row : row + _ROWS] = np.clip(np.nan_to_num(values[row : row + _ROWS] * np.float32(255.0 / top)), 0, 255)
    return scaled if scaled.ndim == 3 else np.repeat(scaled[..., None], 3, axis=2)
