"""Decodes an image file to upright 8-bit RGB pixels, or says why it cannot.

`open_image.py` reads the size first, without memory for pixels, so an image that is too large is refused before its pixels take
memory or time. Then OpenCV decodes, and Pillow what OpenCV cannot. The feeder process bounds the CPU time and the memory of both
(`bounds.py`). Only the first frame of an animation is used. Alpha is dropped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import cv2
import numpy as np
from PIL import UnidentifiedImageError

from pipeline.failures import Failure, ImageError, one_line
from pipeline.feed.decoders import Room, any_room, opencv_8_bit, opencv_pixels, pillow_pixels, turn_upright
from pipeline.feed.open_image import OpenedImage, open_image, open_with_pillow
from pipeline.feed.readable_formats import Size, corrupt, format_of, not_read, too_large

# OpenCV's colour flags mean BGR and cannot be combined with RGB; these give the scale alone
_SCALED_DECODES = ((8, cv2.IMREAD_REDUCED_GRAYSCALE_8), (4, cv2.IMREAD_REDUCED_GRAYSCALE_4), (2, cv2.IMREAD_REDUCED_GRAYSCALE_2))
_MARGIN = 1.5  # a scaled decode keeps at least this many pixels for each pixel of the model's input
_BYTES_PER_PIXEL = 16  # of decoding with Pillow
_MOST_BYTES_PER_PIXEL = 20.5  # as JPEG 2000 in colours takes; of what takes more, fewer pixels are allowed
_OPENCV_FIRST = {"PNG", "WEBP", "BMP", "TIFF", "PPM", "HDR"}  # OpenCV scales 16 bits; Pillow gets what OpenCV cannot read
_OPENCV_JPEG2000_MODES = {"L", "RGB", "RGBA", "I;16"}
_PADDING = b"\xaa" * 64  # behind a JPEG's last pixel a decoder skips it; in place of pixels it makes other ones
_SECONDS = 5.0  # most CPU time of one image whose pixels do not take more, where at most so many pixels are allowed:
_SECONDS_PIXELS = 100_000_000


MORE_MEMORY = Failure("decode", "too_large", "decoding takes more memory than an image of its size needs")


@dataclasses.dataclass(frozen=True, slots=True)
class DecodedImage:
    """Pixels, and the size of the image.

    Attributes:
      pixels: `(h, w, 3) uint8` RGB, upright; smaller than the image if a JPEG was decoded at reduced scale.
      image_wh: Width and height of the upright image at full size.
    """

    pixels: np.ndarray
    image_wh: Size


def decode_image(
    content: bytes, max_pixels: float, needed_wh: Callable[[Size], Size] | None = None, room: Room = any_room
) -> DecodedImage | Failure:
    """Decodes an image file to upright RGB, or says that it is empty, of no format that is read, damaged, or too much work.

    Args:
      content: The file's bytes.
      max_pixels: Most pixels that decoding may produce (for JPEG in several scans: that the image may have). Fewer for formats
        that take more than 20.5 bytes a pixel to decode. It also sets the CPU time of a feeder process: see `most_seconds`.
      needed_wh: Size of the upright image -> its size in the model's input; allows decoding at reduced scale. None: full scale.
      room: Surrounds the decoding.
    """
    if not content:
        return Failure("decode", "empty", "expected an image, got zero bytes")
    try:
        return _decode(open_image(format_of(content), content), max_pixels, needed_wh, room)
    except ImageError as err:
        return err.failure
    except Exception as err:  # noqa: BLE001  decoders raise anything
        return _failure(err)


def _decode(opened: OpenedImage, max_pixels: float, needed_wh: Callable[[Size], Size] | None, room: Room) -> DecodedImage:
    upright_wh = opened.wh[::-1] if opened.orientation >= 5 else opened.wh
    factor, flag = _choose_scale(opened, upright_wh, needed_wh(upright_wh) if needed_wh else None)
    held_pixels = math.prod(opened.wh) / (factor**2 if opened.scales else 1)
    _check_size(opened, held_pixels, max_pixels)
    seconds = math.prod(opened.wh) / 1e6 * opened.seconds_per_megapixel
    with room(held_pixels * opened.bytes_per_pixel, opened.wh, seconds):
        pixels = _decode_jpeg(opened, flag) if opened.format == "JPEG" else _decode_with_opencv(opened)
    if pixels is None:
        with room(held_pixels * max(_BYTES_PER_PIXEL, opened.bytes_per_pixel), opened.wh, seconds):
            pixels = _decode_with_pillow(opened)
    if pixels.shape[1::-1] != tuple(math.ceil(size / factor) for size in opened.wh):
        raise corrupt(f"it says {opened.wh[0]} x {opened.wh[1]} pixels, the image has other ones")
    return DecodedImage(turn_upright(pixels, opened.orientation), upright_wh)


def _check_size(opened: OpenedImage, held_pixels: float, max_pixels: float) -> None:
    more = max(1.0, opened.bytes_per_pixel / _MOST_BYTES_PER_PIXEL)
    if held_pixels * more > max_pixels:
        of_such = f" of such {opened.format}" if more > 1 else ""
        raise too_large(f"{max_pixels / more / 1e6:g} megapixels{of_such}", opened.wh)


def _failure(err: Exception) -> Failure:
    text = one_line(err)
    if isinstance(err, MemoryError) or "out of memory" in text or "error -9" in text:
        return MORE_MEMORY
    if "unsupported" in text.lower() or "cannot handle" in text:
        return not_read(f"one of a kind that is not read: {text}").failure
    if isinstance(err, UnidentifiedImageError):
        return corrupt("Pillow cannot read it").failure
    reason = "truncated" if "truncated" in text.lower() else "corrupt"
    return Failure("decode", reason, f"the image cannot be decoded: {text}")


def most_seconds(max_pixels: float) -> float:
    """Most CPU time of opening one image, and of decoding it if its format and size do not take longer."""
    return _SECONDS * max(1.0, max_pixels / _SECONDS_PIXELS)


def _choose_scale(opened: OpenedImage, upright_wh: Size, needed_wh: Size | None) -> tuple[int, int]:
    """The largest reduction that leaves the margin: (factor, OpenCV's flag)."""
    if opened.format == "JPEG" and needed_wh:
        for factor, flag in _SCALED_DECODES:
            if all(have // factor >= _MARGIN * need for have, need in zip(upright_wh, needed_wh, strict=True)):
                return factor, flag | cv2.IMREAD_COLOR_RGB
    return 1, cv2.IMREAD_COLOR_RGB


def _decode_jpeg(opened: OpenedImage, flag: int) -> np.ndarray:
    pixels = opencv_pixels(opened.content, flag)
    if pixels is None:
        raise ImageError("decode", "truncated" if opened.cut else "corrupt", "the pixels of the JPEG cannot be decoded")
    if opened.cut:
        padded = opencv_pixels(opened.content[:-2] + _PADDING + opened.content[-2:], flag)
        if padded is None or not np.array_equal(pixels, padded):  # a decoder makes up what is missing
            raise ImageError("decode", "truncated", "the JPEG ends within its pixels (no end-of-image marker)")
    return pixels


def _decode_with_opencv(opened: OpenedImage) -> np.ndarray | None:
    """The pixels, if OpenCV reads such images, and this one."""
    image = opened.image
    if opened.format in _OPENCV_FIRST or (image and image.format == "JPEG2000" and image.mode in _OPENCV_JPEG2000_MODES):
        return opencv_8_bit(opened.format, opened.content)
    return None


def _decode_with_pillow(opened: OpenedImage) -> np.ndarray:
    if opened.format == "HDR" or (opened.format == "PNG" and not opened.cut):  # Pillow does not check all sums of a PNG
        raise ImageError("decode", "corrupt", "the pixels cannot be decoded")
    try:
        return pillow_pixels(opened.image or open_with_pillow(opened.format, opened.content))
    except Exception as err:
        if not opened.cut:
            raise
        raise ImageError("decode", "truncated", f"the file has no end: {one_line(err)}") from err
