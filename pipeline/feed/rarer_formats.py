"""Formats that Pillow opens, and OpenCV or Pillow decodes: all but JPEG, PNG and WebP, whose headers `headers/` reads."""

from __future__ import annotations

import dataclasses
import io
import math
import re

import cv2
import numpy as np
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    Jpeg2KImagePlugin,
    PpmImagePlugin,
    TgaImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
)

from pipeline.failures import ImageError
from pipeline.feed.decoders import Room, one_line, opencv_pixels, pillow_pixels, to_8_bit, turn_upright
from pipeline.feed.headers.exif import orientation
from pipeline.feed.headers.header import Size, corrupt, not_read, too_large

# Pillow imports all of its formats if one of these is missing
PLUGINS = (BmpImagePlugin, GifImagePlugin, Jpeg2KImagePlugin, PpmImagePlugin, TgaImagePlugin, TiffImagePlugin)
Image.MAX_IMAGE_PIXELS = None  # `_check_size` has the limit

_BYTES_PER_PIXEL = 16  # of decoding; images that take more may have fewer pixels
_BITS_PER_SAMPLE = 258  # a tag of TIFF
_OPENCV_FIRST = {"BMP", "TIFF", "PPM", "HDR"}  # OpenCV scales 16 bits; Pillow gets what OpenCV cannot read
_OPENCV_JPEG2000_MODES = {"L", "RGB", "RGBA", "I;16"}
_RADIANCE_SIZE = re.compile(rb"-Y +(\d{1,9}) +\+X +(\d{1,9})\n")  # the one orientation that OpenCV reads
_RADIANCE_START = b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n"


@dataclasses.dataclass(frozen=True, slots=True)
class _Opened:
    """An image whose header is read; `image` is None if Pillow cannot read it."""

    name: str
    content: np.ndarray
    wh: Size
    image: Image.Image | None = None


def decode_rarer(name: str, content: bytes, max_pixels: float, room: Room) -> np.ndarray:
    """Decodes an image of a format that `headers/` does not read.

    Args:
      name: Its format, as `formats.format_of` names it.
      content: The file's bytes.
      max_pixels: Most pixels that the image may have.
      room: See `decode_image`.

    Returns:
      `(h, w, 3) uint8` RGB, upright.

    Raises:
      ImageError: The image is damaged or too large, or its decoder is not installed.
    """
    try:
        opened = _open(name, np.frombuffer(content, np.uint8))
        with room(_BYTES_PER_PIXEL * _check_size(opened, max_pixels), opened.wh):
            return _decode(opened)
    except ImageError:
        raise
    except Exception as err:
        raise _refusal(err) from err


def _refusal(err: Exception) -> ImageError:
    text = one_line(err)
    if isinstance(err, MemoryError) or "out of memory" in text or "error -9" in text:
        return ImageError("decode", "too_large", "decoding takes more memory than an image of its size needs")
    if isinstance(err, UnidentifiedImageError):
        return corrupt("Pillow cannot read it")
    if "unsupported" in text.lower():
        return not_read(f"one of a kind that is not read: {text}")
    reason = "truncated" if "truncated" in text.lower() else "corrupt"
    return ImageError("decode", reason, f"the image cannot be decoded: {text}")


def _open(name: str, content: np.ndarray) -> _Opened:
    if name == "HDR":
        return _open_radiance(content.tobytes())
    if name == "PPM":
        content = np.append(content, np.uint8(ord("\n")))  # OpenCV reads a last number up to what follows it
    if name == "HEIF":
        _import_heif()
    return _open_with_pillow(name, content)


def _open_with_pillow(name: str, content: np.ndarray) -> _Opened:
    try:
        image = Image.open(io.BytesIO(content.tobytes()), formats=(name,))
        return _Opened(name, content, image.size, image)
    except Exception:
        pixels = _opencv_8_bit(name, content) if name in _OPENCV_FIRST else None  # it reads some BMP files that Pillow does not
        if pixels is None:
            raise
        return _Opened(name, content, pixels.shape[1::-1])


def _check_size(opened: _Opened, max_pixels: float) -> float:
    """Refuses an image that is too large; returns its pixels, weighted by the memory that each takes to decode."""
    pixels, most = math.prod(opened.wh), f"{max_pixels / 1e6:g} megapixels"
    if pixels > max_pixels:
        raise too_large(most, opened.wh)
    more = max(1.0, _bytes_per_pixel(opened) / _BYTES_PER_PIXEL)
    if pixels * more > max_pixels:
        raise too_large(f"{max_pixels / more / 1e6:.3g} megapixels of such {opened.name}", opened.wh)
    return pixels * more


def _bytes_per_pixel(opened: _Opened) -> float:
    """Peak memory of decoding, as measured."""
    image = opened.image
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return 12 + float(sum(image.tag_v2.get(_BITS_PER_SAMPLE, (1,)))) / 8
    if image and opened.name == "JPEG2000":
        return max(20, 4 + 5.5 * len(image.getbands()))
    return _BYTES_PER_PIXEL


def _open_radiance(content: bytes) -> _Opened:
    """Opens a Radiance picture, which Pillow does not read; OpenCV gets three lines of header, as it fails at most others."""
    end = content.find(b"\n\n")
    found = _RADIANCE_SIZE.match(content, end + 2) if end >= 0 else None
    if not found:
        raise corrupt("a Radiance picture without its size, -Y height +X width, behind the first empty line")
    if b"FORMAT=32-bit_rle_xyze" in content[:end]:
        raise not_read("a Radiance picture in XYZE; RGBE is read")
    plain = np.frombuffer(_RADIANCE_START + content[found.start() :], np.uint8)
    return _Opened("HDR", plain, (int(found[2]), int(found[1])))


def _opencv_8_bit(name: str, content: np.ndarray) -> np.ndarray | None:
    if name != "TIFF":
        return opencv_pixels(content)
    pixels = opencv_pixels(content, cv2.IMREAD_COLOR_BGR | cv2.IMREAD_ANYDEPTH)  # as RGB, OpenCV 4.14 makes 16 bits black
    if pixels is None:
        return None
    return (pixels if pixels.dtype == np.uint8 else to_8_bit(pixels))[..., ::-1]


def _import_heif() -> None:
    try:
        import pillow_heif
    except ImportError as err:
        message = "HEIC and HEIF need pillow-heif: pip install 'hybrid-detection-pipeline[heif]'"
        raise ImageError("decode", "no_decoder", message) from err
    pillow_heif.options.DECODE_THREADS = 1  # images are decoded side by side already
    pillow_heif.register_heif_opener()


def _decode(opened: _Opened) -> np.ndarray:
    """The upright pixels."""
    image, pixels = opened.image, None
    if opened.name in _OPENCV_FIRST or (image and opened.name == "JPEG2000" and image.mode in _OPENCV_JPEG2000_MODES):
        pixels = _opencv_8_bit(opened.name, opened.content)
    if pixels is None and image:
        pixels = pillow_pixels(image)
    if pixels is None:
        raise ImageError("decode", "corrupt", "the pixels cannot be decoded")
    if pixels.shape[1::-1] != opened.wh:
        raise corrupt(f"it says {opened.wh[0]} x {opened.wh[1]} pixels, the image has other ones")
    if image and opened.name == "AVIF":  # the decoders of the others turn the pixels themselves
        return turn_upright(pixels, orientation(image.info.get("exif", b""), image.info.get("xmp", b"")))
    return np.ascontiguousarray(pixels)
