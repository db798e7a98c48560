"""From an image file's bytes to upright 8-bit RGB pixels, or to the reason why not.

The header is looked at first, by code that takes no memory (`headers/`): it says what format the file has, its one size, and
what decoding it costs, so that an image is refused before its pixels take memory or time. Only the first frame of an animation is
used. Alpha is dropped.
"""

from __future__ import annotations

import dataclasses
import io
import math
import threading
import warnings
from collections.abc import Callable

import cv2
import numpy as np
from PIL import AvifImagePlugin, Image

from pipeline.detect.headers.formats import read_header
from pipeline.detect.headers.header import Header, Size
from pipeline.failures import ImageError

cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # what is wrong with a file ends up in its dead letter instead
cv2.setNumThreads(1)  # images are decoded side by side already
AvifImagePlugin.DEFAULT_MAX_THREADS = 1
Image.MAX_IMAGE_PIXELS = 100_000_000  # a second net under the limits below; widened to the largest limit that is asked for

# the colour flags of OpenCV mean BGR and refuse to be combined with RGB; these stand for the scale alone
_SCALED_DECODES = ((8, cv2.IMREAD_REDUCED_GRAYSCALE_8), (4, cv2.IMREAD_REDUCED_GRAYSCALE_4), (2, cv2.IMREAD_REDUCED_GRAYSCALE_2))
_SCALED_MARGIN = 1.5  # a scaled decode keeps at least this many pixels for each one that the model sees
_BYTES_PER_PIXEL = 16  # of decoding; formats that take more may have fewer pixels
_SECONDS = 5.0  # what one image may take of a core, where at most so many pixels are allowed:
_SECONDS_PIXELS = 100_000_000
_ROWS = 64
_LARGE_PIXELS = 25_000_000
_large_decode = threading.Lock()  # one large image at a time: their pixels take 75 MB and more


@dataclasses.dataclass(frozen=True, slots=True)
class DecodedImage:
    """Pixels, and the size of what they show.

    Attributes:
      pixels: `(h, w, 3) uint8` RGB, upright; smaller than the image where a JPEG was decoded at reduced scale.
      image_wh: Width and height of the upright image at full size.
    """

    pixels: np.ndarray
    image_wh: Size


def decode_image(content: bytes, max_pixels: float, needed_wh: Callable[[Size], Size] | None = None) -> DecodedImage:
    """Decodes an image file to upright RGB.

    Args:
      content: The file's bytes.
      max_pixels: Most pixels that decoding may produce (for JPEG in several scans: that the image may have). Where the image's
        format takes more than 16 bytes a pixel while it is decoded, fewer. It also bounds the work: 5 seconds of a core for each
        100 million, and never less than 5.
      needed_wh: Size of the upright image -> size at which the model sees it; allows decoding at reduced scale. None: full scale.

    Raises:
      ImageError: The bytes are empty, no image that is read here, damaged, or too large or too much work.
    """
    if not content:
        raise ImageError("decode", "empty", "expected an image, got zero bytes")
    header = read_header(content)
    upright_wh = header.wh[::-1] if header.orientation >= 5 else header.wh
    factor, flag = _choose_scale(header, upright_wh, needed_wh(upright_wh) if needed_wh else None)
    held_pixels = header.pixels / (factor**2 if header.scales else 1) * max(1.0, header.bytes_per_pixel / _BYTES_PER_PIXEL)
    _check_limits(header, held_pixels, max_pixels)
    if held_pixels > _LARGE_PIXELS:
        with _large_decode:
            pixels = _decode_pixels(header, flag, max_pixels)
    else:
        pixels = _decode_pixels(header, flag, max_pixels)
    if pixels.shape[1::-1] != tuple(math.ceil(size / factor) for size in header.wh):
        raise ImageError("decode", "corrupt", f"the header says {header.wh[0]} x {header.wh[1]} pixels, the image has other ones")
    return DecodedImage(_turn_upright(pixels, header.orientation), upright_wh)


def _check_limits(header: Header, held_pixels: float, max_pixels: float) -> None:
    size = f"{header.wh[0]} x {header.wh[1]} pixels"
    if held_pixels > max_pixels:
        most = f"{max_pixels * header.pixels / held_pixels / 1e6:.3g} megapixels of such {header.format}"
        if held_pixels <= header.pixels:
            most = f"{max_pixels / 1e6:g} megapixels"
        raise ImageError("decode", "too_large", f"expected at most {most}, got {size}; max_megapixels sets the limit")
    seconds = _SECONDS * max(1.0, max_pixels / _SECONDS_PIXELS)
    if header.seconds > seconds:
        raise ImageError(
            "decode",
            "too_much_work",
            f"expected at most {seconds:g} s of decoding, got {header.format} of {size} that may take {header.seconds:.0f} s; "
            "max_megapixels sets the limit",
        )


def _choose_scale(header: Header, upright_wh: Size, needed_wh: Size | None) -> tuple[int, int]:
    """The largest reduction that leaves the model a margin: (factor, OpenCV's flag)."""
    if header.format == "JPEG" and needed_wh:
        for factor, flag in _SCALED_DECODES:
            if all(have // factor >= _SCALED_MARGIN * need for have, need in zip(upright_wh, needed_wh, strict=True)):
                return factor, flag | cv2.IMREAD_COLOR_RGB
    return 1, cv2.IMREAD_COLOR_RGB


def _decode_pixels(header: Header, flag: int, max_pixels: float) -> np.ndarray:
    pixels = _opencv(header.content, flag | cv2.IMREAD_IGNORE_ORIENTATION) if "opencv" in header.decoders else None
    if pixels is None and "pillow" in header.decoders:
        pixels = _pillow(header, max_pixels)
    if pixels is None:
        reason = "truncated" if header.cut else "corrupt"
        raise ImageError("decode", reason, f"the pixels of the {header.format} cannot be decoded")
    return pixels


def _opencv(content: bytes, flag: int) -> np.ndarray | None:
    try:
        return cv2.imdecode(np.frombuffer(content, np.uint8), flag)
    except cv2.error:
        return None


def _pillow(header: Header, max_pixels: float) -> np.ndarray:
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, int(max_pixels))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(header.content), formats=(header.format,)) as image:
                if image.mode.startswith(("I", "F")):  # Pillow would clip these to 8 bits, not scale
                    return _to_8_bit(image)
                return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except Exception as err:
        reason = "truncated" if header.cut or "truncated" in str(err).lower() else "corrupt"
        raise ImageError("decode", reason, f"the pixels cannot be decoded: {_one_line(err)}") from err


def _to_8_bit(image: Image.Image) -> np.ndarray:
    values = np.asarray(image)
    top = 65535.0 if image.mode.startswith("I") else max(float(values.max(initial=0)), 1e-9)
    grey = np.empty(values.shape, np.uint8)
    for row in range(0, len(values), _ROWS):  # all at once would take 12 bytes more a pixel
        grey[row : row + _ROWS] = np.clip(values[row : row + _ROWS] * np.float32(255.0 / top), 0, 255)
    return np.repeat(grey[..., None], 3, axis=2)


def _turn_upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Applies an EXIF orientation (1 to 8, as in Exif 2.3, section 4.6.4) with a view or one copy."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    flip_rows, flip_columns = _FLIPS[orientation]
    return np.ascontiguousarray(pixels[:: -1 if flip_rows else 1, :: -1 if flip_columns else 1])


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


def _one_line(err: Exception) -> str:
    return " ".join(str(err).split())[:200] or type(err).__name__
