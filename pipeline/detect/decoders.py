"""OpenCV and Pillow, as both this process and the decoding child process call them."""

from __future__ import annotations

import contextlib
import threading

import cv2
import numpy as np
from PIL import AvifImagePlugin, Image

cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # what is wrong with a file ends up in its dead letter instead
cv2.setNumThreads(1)  # images are decoded side by side already
AvifImagePlugin.DEFAULT_MAX_THREADS = 1

_ROWS = 64
_LARGE_PIXELS = 25_000_000
_large_decode = threading.Lock()


def one_large_at_a_time(pixels: float) -> contextlib.AbstractContextManager[object]:
    """Held while so many pixels are decoded: large images, whose pixels take 75 MB and more, wait for each other."""
    return _large_decode if pixels > _LARGE_PIXELS else contextlib.nullcontext()


def opencv_pixels(content: bytes | np.ndarray, flag: int = cv2.IMREAD_COLOR_RGB) -> np.ndarray | None:
    """Decodes with OpenCV, which leaves a JPEG's or PNG's orientation as it is.

    Returns:
      `(h, w, 3) uint8` RGB; None where OpenCV cannot.

    Raises:
      MemoryError: The pixels take more memory than there is.
    """
    try:
        return cv2.imdecode(np.frombuffer(content, np.uint8), flag | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as err:
        if err.code == cv2.Error.StsNoMem:
            raise MemoryError(str(err)) from err
        return None


def pillow_pixels(image: Image.Image) -> np.ndarray:
    """The pixels of an image that Pillow has opened, `(h, w, 3) uint8` RGB; raises whatever Pillow does."""
    if image.mode.startswith(("I", "F")):  # Pillow would clip these to 8 bits, not scale
        return _to_8_bit(image)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def turn_upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Applies an EXIF orientation (1 to 8, as in Exif 2.3, section 4.6.4) with a view or one copy."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    flip_rows, flip_columns = _FLIPS[orientation]
    return np.ascontiguousarray(pixels[:: -1 if flip_rows else 1, :: -1 if flip_columns else 1])


def one_line(err: Exception) -> str:
    """The message of a library's error, for a dead letter."""
    return " ".join(str(err).split())[:200] or type(err).__name__


def _to_8_bit(image: Image.Image) -> np.ndarray:
    values = np.asarray(image)
    top = 65535.0 if image.mode.startswith("I") else max(float(values.max(initial=0)), 1e-9)
    grey = np.empty(values.shape, np.uint8)
    for row in range(0, len(values), _ROWS):  # all at once would take 12 bytes more a pixel
        grey[row : row + _ROWS] = np.clip(values[row : row + _ROWS] * np.float32(255.0 / top), 0, 255)
    return np.repeat(grey[..., None], 3, axis=2)


_FLIPS = {  # after the transposition of 5 to 8: (flip top and bottom, flip left and right)
    1: (False, False),
    2: (False, True),
    3: (True, True),
    4: (True, False),
    5: (False, False),
    6: (False, True),
    7: (True, True),
    8: (True, False),
}
