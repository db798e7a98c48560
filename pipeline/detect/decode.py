"""From an image file's bytes to upright 8-bit RGB pixels, or to the reason why not.

The header is looked at first, so that an image is refused before its pixels take memory. OpenCV decodes, since it is the
fastest and can
decode JPEG at reduced scale; what it cannot read goes to Pillow. Only the first frame of an animation is used. Alpha is dropped.
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
from PIL import Image, UnidentifiedImageError

from pipeline.detect.image_size import declared_wh
from pipeline.failures import ImageError

cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # what is wrong with a file ends up in its dead letter instead
cv2.setNumThreads(1)  # images are decoded side by side already
Image.MAX_IMAGE_PIXELS = None  # the limit below is stricter, and an error

Image.init()
_FORMATS = tuple(name for name in Image.ID if name not in ("EPS", "WMF"))  # Pillow would run another program on these
Size = tuple[int, int]

_EXIF_ORIENTATION = 0x0112
_JPEG_FORMATS = ("JPEG", "MPO")
# the colour flags of OpenCV mean BGR and refuse to be combined with RGB; these stand for the scale alone
_SCALED_DECODES = ((8, cv2.IMREAD_REDUCED_GRAYSCALE_8), (4, cv2.IMREAD_REDUCED_GRAYSCALE_4), (2, cv2.IMREAD_REDUCED_GRAYSCALE_2))
_SCALED_MARGIN = 1.5  # a scaled decode keeps at least this many pixels for each one that the model sees
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Header:
    format: str
    wh: Size
    orientation: int
    progressive: bool


def decode_image(content: bytes, max_pixels: float, needed_wh: Callable[[Size], Size] | None = None) -> DecodedImage:
    """Decodes an image file to upright RGB.

    Args:
      content: The file's bytes.
      max_pixels: Most pixels that decoding may produce (for progressive JPEG: that the image may have).
      needed_wh: Size of the upright image -> size at which the model sees it; allows decoding at reduced scale. None: full scale.

    Raises:
      ImageError: The bytes are empty, no image, damaged, or too large an image.
    """
    if not content:
        raise ImageError("decode", "empty", "expected an image, got zero bytes")
    header = _read_header(content, max_pixels)
    upright_wh = header.wh[::-1] if header.orientation >= 5 else header.wh
    factor, flag = _choose_scale(header, upright_wh, needed_wh(upright_wh) if needed_wh else None)
    held_pixels = header.wh[0] * header.wh[1] / (1 if header.progressive else factor**2)
    _check_pixels(held_pixels, header.wh, max_pixels)
    if header.format in _JPEG_FORMATS and not _has_jpeg_end(content):
        raise ImageError("decode", "truncated", "the JPEG ends within its pixels (no end-of-image marker)")
    if held_pixels > _LARGE_PIXELS:
        with _large_decode:
            pixels = _decode_pixels(content, header, factor, flag)
    else:
        pixels = _decode_pixels(content, header, factor, flag)
    if pixels.shape[1::-1] != tuple(math.ceil(size / factor) for size in header.wh):
        raise ImageError("decode", "corrupt", f"the header says {header.wh[0]} x {header.wh[1]} pixels, the image has other ones")
    return DecodedImage(_turn_upright(pixels, header.orientation), upright_wh)


def _check_pixels(pixels: float, wh: Size, max_pixels: float) -> None:
    if pixels > max_pixels:
        size = f"{wh[0]} x {wh[1]} pixels"
        raise ImageError(
            "decode", "too_large", f"expected at most {max_pixels / 1e6:g} megapixels, got {size}; max_megapixels sets the limit"
        )


def _read_header(content: bytes, max_pixels: float) -> _Header:
    """Size, format and orientation, from the header alone."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
                return _Header(image.format or "", image.size, _orientation(image), "progressive" in image.info)
    except Exception as err:  # noqa: BLE001  Pillow's plugins raise nearly anything on a header they don't understand
        return _read_header_by_decoding(content, max_pixels, err)


def _read_header_by_decoding(content: bytes, max_pixels: float, err: Exception) -> _Header:
    """For what Pillow cannot read but OpenCV may: Radiance HDR, some BMPs, TIFFs of floats, PNGs with broken texts."""
    wh = declared_wh(content)
    if wh:
        _check_pixels(wh[0] * wh[1], wh, max_pixels)
        pixels = _opencv(content, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
        if pixels is not None:
            return _Header("", (pixels.shape[1], pixels.shape[0]), 1, progressive=False)
    if isinstance(err, UnidentifiedImageError):
        raise ImageError(
            "decode", "not_an_image", f"expected an image, got {len(content)} bytes that start with {content[:12]!r}"
        ) from err
    raise ImageError("decode", "corrupt", f"damaged image header: {_one_line(err)}") from err


def _has_jpeg_end(content: bytes) -> bool:
    """Whether an end-of-image marker follows the first scan (one before it would belong to an embedded thumbnail)."""
    if content.endswith(b"\xff\xd9"):
        return True
    at = 2
    while at + 4 <= len(content) and content[at] == 0xFF and content[at + 1] != 0xDA:
        at += 2 + int.from_bytes(content[at + 2 : at + 4], "big") if content[at + 1] != 0xFF else 1
    return content.find(b"\xff\xd9", at) >= 0


def _orientation(image: Image.Image) -> int:
    if image.format == "TIFF":
        return 1  # OpenCV and Pillow both turn a TIFF's pixels upright themselves, and Pillow swaps its size
    try:
        if image.format == "PNG":  # Pillow would decode all pixels to look for Exif behind them
            exif = Image.Exif()
            exif.load(image.info.get("exif", b""))
        else:
            exif = image.getexif()
        value = exif.get(_EXIF_ORIENTATION, 1)
    except Exception:  # noqa: BLE001  a broken EXIF block does not make the pixels unreadable
        return 1
    return value if value in range(1, 9) else 1


def _choose_scale(header: _Header, upright_wh: Size, needed_wh: Size | None) -> tuple[int, int]:
    """The largest reduction that leaves the model a margin: (factor, OpenCV's flag)."""
    if header.format in _JPEG_FORMATS and needed_wh:
        for factor, flag in _SCALED_DECODES:
            if all(have // factor >= _SCALED_MARGIN * need for have, need in zip(upright_wh, needed_wh, strict=True)):
                return factor, flag | cv2.IMREAD_COLOR_RGB
    return 1, cv2.IMREAD_COLOR_RGB


def _decode_pixels(content: bytes, header: _Header, factor: int, flag: int) -> np.ndarray:
    pixels = _opencv(content, flag | cv2.IMREAD_IGNORE_ORIENTATION)
    return pixels if pixels is not None else _pillow(content, (header.wh[0] // factor, header.wh[1] // factor))


def _opencv(content: bytes, flag: int) -> np.ndarray | None:
    try:
        return cv2.imdecode(np.frombuffer(content, np.uint8), flag)
    except cv2.error:
        return None


def _pillow(content: bytes, least_wh: Size) -> np.ndarray:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
                image.seek(0)
                image.draft("RGB", least_wh)  # reduced scale for JPEG, nothing for others
                many_bits = image.mode.startswith(("I", "F"))  # Pillow would clip these to 8 bits, not scale
                return np.asarray((_to_8_bit(image) if many_bits else image).convert("RGB"))
    except Exception as err:
        reason = "truncated" if "truncated" in str(err).lower() else "corrupt"
        raise ImageError("decode", reason, f"the pixels cannot be decoded: {_one_line(err)}") from err


def _to_8_bit(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.float32)
    top = 65535.0 if image.mode.startswith("I") else max(float(values.max(initial=0)), 1e-9)
    return Image.fromarray(np.clip(values * (255.0 / top), 0, 255).astype(np.uint8))


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
